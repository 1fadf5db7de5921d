"""How far the policy's log-probs are from those of what sampled the responses, and how much of a
ratio is rounding.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.packing.pack import Packing
from fastp3o.packing.packed_row import PackedRow, to_device
from fastp3o.packing.tables import by_group, sums_by_group
from fastp3o.rollouts.groups import Group, pack_groups

# Share of the clip range; beyond it, clipping acts on rounding more often than users would want.
TOLERATED = 0.2
# Rounding does not change from one update to the next: a few responses, now and then, tell of it.
NOISE_EVERY, NOISE_RESPONSES = 10, 8


def measures_noise(update: int) -> bool:
    """Whether an update measures `ratio/noise`: the first one, and every NOISE_EVERY-th after it."""
    return update % NOISE_EVERY == 1


def first_responses(groups: Sequence[Group], row: PackedRow) -> list[Group]:
    """Each of a row's first responses as a group, whose prompt is its own: NOISE_RESPONSES, or as
    many as are no longer than the row, since a longer one would take more memory than training
    does; at least one.
    """
    members = [groups[number] for number in row.groups]
    unshared = [
        Group(group.prompt, [response]) for group in members for response in group.responses
    ][:NOISE_RESPONSES]
    ends = accumulate(len(prompt.ids) + len(response.ids) for prompt, (response,) in unshared)
    return unshared[: max(1, bisect_right(list(ends), row.tokens))]


@torch.no_grad()
def evaluated_again(policy: PackedModel, groups: Sequence[Group], row: PackedRow) -> Tensor:
    """log π(y|x) of a row's first responses (`first_responses`), [n] fp32, as another row gives
    them.

    In that they are in opposite order, each with its own copy of the prompt, so that every matrix
    product has another shape. Its rotary positions begin at 1, which turns queries and keys alike
    and rounds all of them again. Without rotary positions only the shapes differ; libraries that
    round a row the same in every shape, as on CPUs, then show no noise.
    """
    unshared = first_responses(groups, row)
    length = sum(len(prompt.ids) + len(response.ids) for prompt, (response,) in unshared)
    (again,) = pack_groups(unshared[::-1], Packing(tokens_per_row=length))
    if policy.relative_positions:
        again = replace(again, position_ids=again.position_ids + 1)
    again = again.to(row.labels.device)
    return sums_by_group([again], [labeled_logprobs(policy, again)]).flatten().flip(0)


@torch.no_grad()
def logprob_metrics(
    groups: Sequence[Group], microbatches: Sequence[Microbatch], again: Tensor | None
) -> dict[str, Tensor]:
    """How far the policy's log-probs before an update's first step are from others of the same
    responses, 0-d fp32.

    ratio/noise: root mean square of the difference to `evaluated_again` of the first microbatch, in
    nats per response; absent without. sampler_gap: root mean square over responses of log π(y|x) as
    sampled less the policy's, in nats. sampler_kl: its mean, an estimate of the KL of what sampled
    to the policy. Without log-probs of the sampler the last two are absent. microbatches: those
    whose log-probs by the policy are known.
    """
    metrics: dict[str, Tensor] = {}
    sums = [
        microbatch.response_sums(microbatch.policy_token_logprobs) for microbatch in microbatches
    ]
    if again is not None:
        noise = again - sums[0].flatten()[: len(again)]
        metrics["ratio/noise"] = noise.square().mean().sqrt()
    if any(response.logprobs is None for group in groups for response in group.responses):
        return metrics

    # [P, K] each, in the order of the groups' numbers.
    rows = [microbatch.row for microbatch in microbatches]
    policys = by_group(rows, [values.flatten() for values in sums])
    samplers = []
    for number in sorted(number for row in rows for number in row.groups):
        responses = groups[number].responses
        samplers.append([sum(response.logprobs or ()) for response in responses])
    gaps = to_device(torch.tensor(samplers), policys.device) - policys
    metrics["sampler_gap"] = gaps.square().mean().sqrt()
    metrics["sampler_kl"] = gaps.mean()
    return metrics


@dataclass(frozen=True)
class Comparison:
    """What `logprob_metrics` compares, kept until the policy's log-probs of all of it are known."""

    groups: Sequence[Group]
    microbatches: Sequence[Microbatch]
    again: Tensor | None

    def metrics(self) -> dict[str, Tensor]:
        return logprob_metrics(self.groups, self.microbatches, self.again)


def noise_warning(noise: float, clip_range: float, precision: str, device: str) -> str:
    """device: its type. A CPU takes far longer for fp16 than for fp32."""
    better = {"fp32": "--precision fp32 has the least: use", "fp16": "Use --precision fp32,"}
    finer = "fp16 or fp32" if device == "cuda" else "fp32"
    return (
        f"warning: rounding alone moves log-ratios by {noise:.3g} (ratio/noise), more than {TOLERATED:.0%} of the clip "
        f"range {clip_range:.3g} of whole responses: part of the clipping is noise. "
        f"{better.get(precision, f'Use --precision {finer},')} shorter responses, or a wider clip range."
    )
