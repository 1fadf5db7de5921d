"""Anchored preference optimization (arXiv 2408.06266). Column 0 is the chosen response."""

from torch import Tensor


def apo_zero(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """(1 − σ(β ℓ_chosen)) + σ(β ℓ_rejected), ℓ = log π/π_ref, [P, 2] -> [P]: chosen responses become likelier, rejected
    ones less likely. For data better than the policy's own.
    """
    chosen, rejected = (beta * (logprobs - ref_logprobs.detach())).unbind(1)
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """σ(β ℓ_chosen) + 1 − σ(β (ℓ_chosen − ℓ_rejected)), [P, 2] -> [P]: both become less likely, the rejected ones more
    so. For data worse than the policy's own.
    """
    chosen, rejected = (beta * (logprobs - ref_logprobs.detach())).unbind(1)
    return chosen.sigmoid() + (rejected - chosen).sigmoid()
