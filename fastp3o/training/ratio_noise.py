"""Measures how much of a ratio is rounding: two evaluations of the same log-probs that are mathematically equal."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.objectives.base import Microbatch
from fastp3o.packing.pack import Packing, by_group, pack
from fastp3o.rollouts.groups import Group
from fastp3o_kernels import sequence_logprobs

# Share of the clip range; beyond it, clipping acts on rounding more often than users would want.
TOLERATED = 0.2


@torch.no_grad()
def ratio_noise(policy: PackedModel, groups: Sequence[Group], microbatch: Microbatch) -> Tensor:
    """Root mean square of the difference of log π(y|x) between two evaluations, 0-d fp32, in nats per response.

    The first is the row of `microbatch`, on which the policy trains. The second is a row of its first responses in
    opposite order, each with its own copy of the prompt, so that every matrix product has another shape. It has only as
    many responses as fit into the same length, since a longer row would take more memory than training does. Its rotary
    positions begin at 1, which turns queries and keys alike and rounds all of them anew. Without rotary positions only
    the shapes differ; libraries that round a row the same in every shape, as on CPUs, then show no noise.
    """
    own = [groups[number] for number in microbatch.row.groups]
    unshared = [(group.prompt.ids, response.ids) for group in own for response in group.responses]
    ends = list(accumulate(len(prompt) + len(ids) for prompt, ids in unshared))
    fitting = max(1, bisect_right(ends, microbatch.row.tokens))
    prompt_ids, responses = zip(*[(prompt, [ids]) for prompt, ids in unshared[:fitting][::-1]], strict=True)
    (row,) = pack(prompt_ids, responses, Packing(tokens_per_row=ends[fitting - 1]))
    if policy.relative_positions:
        row = replace(row, position_ids=row.position_ids + 1)
    row = row.to(microbatch.old_logprobs.device)
    again = by_group([row], [sequence_logprobs(labelled_logprobs(policy, row), row.cu_seqlens)])
    return (again.flatten().flip(0) - microbatch.old_logprobs.flatten()[:fitting]).square().mean().sqrt()


def noise_warning(noise: float, clip_range: float, precision: str) -> str:
    better = {"fp32": "--precision fp32 has the least: use", "fp16": "Use --precision fp32,"}
    return (
        f"warning: rounding alone moves log-ratios by {noise:.3g} (ratio/noise), more than {TOLERATED:.0%} of the clip "
        f"range {clip_range:.3g} of whole responses: part of the clipping is noise. "
        f"{better.get(precision, 'Use --precision fp16 or fp32,')} shorter responses, or a wider clip range."
    )
