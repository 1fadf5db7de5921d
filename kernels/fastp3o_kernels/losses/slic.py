"""Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425)."""

from torch import Tensor


def slic(logprobs: Tensor, target_logprobs: Tensor | None = None, *, delta: float = 1.0, weight: float = 1.0) -> Tensor:
    """max(0, δ − log π_chosen + log π_rejected) − λ log π(y_target), [P, 2] -> [P] (equation 1).

    Column 0 is the chosen response. target_logprobs: [P], log π of the texts that keep the policy near the SFT data,
    differentiable; without them the chosen responses, which the paper proposes, too.
    """
    target = logprobs[:, 0] if target_logprobs is None else target_logprobs
    return (delta - logprobs[:, 0] + logprobs[:, 1]).clamp(min=0) - weight * target
