"""Log-probs by what sampled the responses, and how far they are from the policy's."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.base import Microbatch
from fastp3o.packing.on_device import to_device
from fastp3o.packing.pack import by_group
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rollouts.groups import Group
from fastp3o.training.microbatches import policy_logprobs
from fastp3o.training.ratio_noise import ratio_noise
from fastp3o_kernels import sequence_logprobs


def sampler_logprobs(groups: Sequence[Group], rows: Sequence[PackedRow]) -> tuple[Tensor, ...]:
    """The sampler's log-probs of the rows' tokens, [N] fp32 for each row, on its device.

    Raises ValueError if the sampler has given none.
    """
    for group in groups:
        if any(response.logprobs is None for response in group.responses):
            raise UserError("what sampled the responses gave no log-probs of them, as transformers' generate does not")
    on_host = tuple(
        torch.tensor(
            [value for g in row.groups for response in groups[g].responses for value in response.logprobs or ()]
        )
        for row in rows
    )
    return to_device(on_host, rows[0].labels.device)


def with_sampler_logprobs(groups: Sequence[Group], minibatches: list[list[Microbatch]]) -> list[list[Microbatch]]:
    """The microbatches with the log-probs of what sampled."""
    sampled = iter(sampler_logprobs(groups, [one.row for minibatch in minibatches for one in minibatch]))
    return [[replace(one, sampler_token_logprobs=next(sampled)) for one in minibatch] for minibatch in minibatches]


@torch.no_grad()
def logprob_metrics(
    policy: PackedModel, groups: Sequence[Group], minibatches: list[list[Microbatch]], *, old_are_policys: bool
) -> dict[str, Tensor]:
    """How far the policy's log-probs before an update's first step are from others of the same responses, 0-d fp32.

    ratio/noise: see `ratio_noise`. sampler_gap: root mean square over responses of log π(y|x) as sampled less the
    policy's, in nats. sampler_kl: its mean, an estimate of the KL of what sampled to the policy. Without log-probs of
    the sampler the last two are absent. They are of this process's first row if `old_are_policys` is false, since the
    policy's own are known of no other.
    """
    microbatches = list(chain.from_iterable(minibatches))
    if not old_are_policys:
        first = microbatches[0]
        (own,) = policy_logprobs(policy, [first.row])
        sums = sequence_logprobs(own, first.row.cu_seqlens).view(first.rewards.shape)
        microbatches = [replace(first, old_token_logprobs=own, old_logprobs=sums)]
    metrics = {"ratio/noise": ratio_noise(policy, groups, microbatches[0])}
    gaps = sampler_gaps(groups, microbatches)
    if gaps is not None:
        metrics |= {"sampler_gap": gaps.square().mean().sqrt(), "sampler_kl": gaps.mean()}
    return metrics


def sampler_gaps(groups: Sequence[Group], microbatches: Sequence[Microbatch]) -> Tensor | None:
    """log π(y|x) as sampled less the old one, [P, K] fp32, in nats. None if the sampler does not give all log-probs."""
    if any(response.logprobs is None for group in groups for response in group.responses):
        return None
    old = by_group([m.row for m in microbatches], [m.old_logprobs.flatten() for m in microbatches])
    own = sorted(number for m in microbatches for number in m.row.groups)
    sampled = torch.tensor([[response.logprob for response in groups[number].responses] for number in own])
    return to_device(sampled, old.device) - old
