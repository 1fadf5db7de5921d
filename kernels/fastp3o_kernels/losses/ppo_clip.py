"""PPO's clipped ratio (arXiv 1707.06347)."""

import torch
from torch import Tensor


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> Tensor:
    """max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)), ρ = π / π_old, of each token or response. Any shape.

    clip_high: clip_low by default; a larger one is DAPO's "clip-higher" (arXiv 2503.14476).
    """
    ratios = (logprobs - old_logprobs.detach()).exp()
    clipped = ratios.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    advantages = advantages.detach()
    return torch.maximum(-advantages * ratios, -advantages * clipped)
