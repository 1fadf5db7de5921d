"""Direct preference optimization (arXiv 2305.18290), and against the behaviour policy."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def preference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Δ = log π/π_ref of the chosen response less that of the rejected one, [P, 2] -> [P]; column 0 is the chosen."""
    log_ratios = logprobs - ref_logprobs.detach()
    return log_ratios[:, 0] - log_ratios[:, 1]


def dpo(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.1, label_smoothing: float = 0.0) -> Tensor:
    """−log σ(β Δ), [P, 2] -> [P] (equation 7); column 0 is the chosen response.

    The gradient is β (σ(β Δ) − 1) (∇ log π_chosen − ∇ log π_rejected). A larger β allows less deviation from the
    reference. label_smoothing: the probability that a label is wrong (conservative DPO, Mitchell 2023).
    """
    difference = beta * preference(logprobs, ref_logprobs)
    loss = -(1 - label_smoothing) * logsigmoid(difference)
    return loss - label_smoothing * logsigmoid(-difference) if label_smoothing else loss


def bpo(logprobs: Tensor, behavior_logprobs: Tensor, *, beta: float = 0.1) -> Tensor:
    """DPO whose reference is the policy that sampled the pairs, refreshed every few updates (behaviour preference
    optimization, arXiv 2406.12168), [P, 2] -> [P].
    """
    return dpo(logprobs, behavior_logprobs, beta=beta)
