"""Simple preference optimization, without a reference (arXiv 2405.14734)."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def simpo(mean_logprobs: Tensor, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """−log σ(β (mean log π_chosen − mean log π_rejected) − γ), [P, 2] -> [P] (equation 6).

    mean_logprobs: means over the tokens of each response; column 0 is the chosen one. gamma: the target margin.
    """
    return -logsigmoid(beta * (mean_logprobs[:, 0] - mean_logprobs[:, 1]) - gamma)
