"""Kahneman-Tversky optimization: single responses, each desirable or not (arXiv 2402.01306)."""

from torch import Tensor


def kto(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    desirable: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """λ_D (1 − σ(β (ℓ − z0))) where desirable, else λ_U (1 − σ(β (z0 − ℓ))), ℓ = log π/π_ref; any shape (equation 8).

    desirable: bool, of the same shape. reference_point: z0 of `kto_reference_point`, 0-d.
    """
    log_ratios = logprobs - ref_logprobs.detach()
    distance = beta * (log_ratios - reference_point)
    return (desirable_weight * (-distance).sigmoid()).where(desirable, undesirable_weight * distance.sigmoid())


def kto_reference_point(mismatched_logprobs: Tensor, mismatched_ref_logprobs: Tensor) -> Tensor:
    """z0: the mean of log π/π_ref over prompts with another prompt's response, at least 0; 0-d, detached.

    Of the whole batch: with several processes or accumulation, the mean over all before it is cut off at 0.
    """
    return (mismatched_logprobs - mismatched_ref_logprobs).detach().mean().clamp(min=0)
