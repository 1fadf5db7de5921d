"""How far the sampler's log-probs are from those that the policy trains with: rounding, or a sampler that is wrong."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o.objectives.base import Microbatch
from fastp3o.packing.pack import by_group
from fastp3o.rollouts.rollouts import Rollouts


def sampler_gap(rollouts: Rollouts, microbatches: Sequence[Microbatch]) -> Tensor | None:
    """Root mean square over responses of log π(y|x) as sampled less the old one, 0-d fp32, in nats per response.

    None where the sampler does not give its log-probs.
    """
    if rollouts.logprobs is None:
        return None
    old = by_group([m.row for m in microbatches], [m.old_logprobs.flatten() for m in microbatches])
    groups = sorted(group for m in microbatches for group in m.row.groups)
    sampled = torch.tensor([[sum(response) for response in rollouts.logprobs[group]] for group in groups])
    return (sampled.to(old) - old).square().mean().sqrt()
