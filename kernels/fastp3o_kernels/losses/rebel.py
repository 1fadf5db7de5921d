"""Regression to relative rewards (REBEL, arXiv 2404.16767)."""

from torch import Tensor


def rebel(logprobs: Tensor, old_logprobs: Tensor, rewards: Tensor, *, eta: float = 1.0) -> Tensor:
    """((Δ log π/π_old) / η − (r1 − r2))² of each pair, [P, 2] -> [P]; Δ is of response 1 and 2 (equation 1)."""
    log_ratios = logprobs - old_logprobs.detach()
    rewards = rewards.detach()
    difference = log_ratios[:, 0] - log_ratios[:, 1]
    return (difference / eta - (rewards[:, 0] - rewards[:, 1])).square()
