"""Log-probs by what sampled the responses, how far they are from the policy's, and how much of a ratio is rounding."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, chain

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.packing.pack import Packing, by_group, sums_by_group
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o.rollouts.groups import Group, pack_groups
from fastp3o.training.microbatches import policy_logprobs
from fastp3o_kernels import sequence_logprobs

# Share of the clip range; beyond it, clipping acts on rounding more often than users would want.
TOLERATED = 0.2


def sampler_logprobs(groups: Sequence[Group], rows: Sequence[PackedRow]) -> tuple[Tensor, ...]:
    """The sampler's log-probs of the rows' tokens, [N] fp32 each, on their device. Raises ValueError without any."""
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
        (logprobs,) = policy_logprobs(policy, [first.row])
        sums = sequence_logprobs(logprobs, first.row.cu_seqlens).view(first.rewards.shape)
        microbatches = [replace(first, old_token_logprobs=logprobs, old_logprobs=sums)]
    metrics = {"ratio/noise": ratio_noise(policy, groups, microbatches[0])}
    if any(response.logprobs is None for group in groups for response in group.responses):
        return metrics
    old = by_group([m.row for m in microbatches], [m.old_logprobs.flatten() for m in microbatches])
    numbers = sorted(number for m in microbatches for number in m.row.groups)
    sampled = torch.tensor([[sum(response.logprobs or ()) for response in groups[n].responses] for n in numbers])
    gaps = to_device(sampled, old.device) - old
    return metrics | {"sampler_gap": gaps.square().mean().sqrt(), "sampler_kl": gaps.mean()}


@torch.no_grad()
def ratio_noise(policy: PackedModel, groups: Sequence[Group], microbatch: Microbatch) -> Tensor:
    """Root mean square of the difference of log π(y|x) between two evaluations, 0-d fp32, in nats per response.

    The first is the row of `microbatch`, on which the policy trains. The second is a row of its first responses in
    opposite order, each with its own copy of the prompt, so that every matrix product has another shape. It has only as
    many responses as fit into the same length, since a longer row would take more memory than training does. Its rotary
    positions begin at 1, which turns queries and keys alike and rounds all of them anew. Without rotary positions only
    the shapes differ; libraries that round a row the same in every shape, as on CPUs, then show no noise.
    """
    members = [groups[number] for number in microbatch.row.groups]
    unshared = [Group(group.prompt, [response]) for group in members for response in group.responses]
    ends = list(accumulate(len(prompt.ids) + len(response.ids) for prompt, (response,) in unshared))
    fitting = max(1, bisect_right(ends, microbatch.row.tokens))
    (row,) = pack_groups(unshared[:fitting][::-1], Packing(tokens_per_row=ends[fitting - 1]))
    if policy.relative_positions:
        row = replace(row, position_ids=row.position_ids + 1)
    row = row.to(microbatch.old_logprobs.device)
    again = sums_by_group([row], [labelled_logprobs(policy, row)])
    return (again.flatten().flip(0) - microbatch.old_logprobs.flatten()[:fitting]).square().mean().sqrt()


def noise_warning(noise: float, clip_range: float, precision: str) -> str:
    better = {"fp32": "--precision fp32 has the least: use", "fp16": "Use --precision fp32,"}
    return (
        f"warning: rounding alone moves log-ratios by {noise:.3g} (ratio/noise), more than {TOLERATED:.0%} of the clip "
        f"range {clip_range:.3g} of whole responses: part of the clipping is noise. "
        f"{better.get(precision, 'Use --precision fp16 or fp32,')} shorter responses, or a wider clip range."
    )
