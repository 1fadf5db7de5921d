"""Group sequence policy optimization (arXiv 2507.18071)."""

from torch import Tensor

from fastp3o_kernels.losses.ppo_clip import ppo_clip


def gspo(
    mean_logprobs: Tensor,
    old_mean_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """−min(s A, clip(s) A), s = (π / π_old)^(1 / |y|) of each response: PPO's loss of the geometric mean of its tokens'
    ratios. Any shape; defaults of the paper's experiments.

    mean_logprobs: means over the tokens of each response.
    """
    return ppo_clip(mean_logprobs, old_mean_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
