"""Estimators of KL(π ‖ π_ref) from samples of π, tokens or responses (Schulman, "Approximating KL divergence", 2020).

r = π_ref / π at a sample. A loss follows an estimator's gradient with the samples held fixed, which is not the gradient
of the estimated KL (arXiv 2506.09477): each docstring says which gradient it is on-policy. Off-policy, each must be
multiplied by the ratio π / π_old.
"""

import torch
from torch import Tensor


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log π − log π_ref: unbiased, of either sign. As a loss it is useless: the mean of its gradient, that of log π, is
    0. In a reward, detached, it is the usual choice.
    """
    return logprobs - ref_logprobs.detach()


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """(log r)² / 2: biased, never negative. Its gradient is that of KL(π ‖ π_ref)."""
    return k1(logprobs, ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """r − 1 − log r: unbiased, never negative; GRPO's. Its gradient, (1 − r) ∇ log π, is that of KL(π_ref ‖ π), the
    other direction.
    """
    log_ratios = ref_logprobs.detach() - logprobs
    return torch.expm1(log_ratios) - log_ratios
