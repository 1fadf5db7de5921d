"""Contrastive preference optimization, without a reference (arXiv 2401.08417)."""

from torch import Tensor
from torch.nn.functional import logsigmoid


def cpo(logprobs: Tensor, *, beta: float = 0.1, weight: float = 1.0) -> Tensor:
    """−log σ(β (log π_chosen − log π_rejected)) − λ log π_chosen, [P, 2] -> [P] (equations 3 and 4; λ is 1 there).

    Column 0 is the chosen response.
    """
    return -logsigmoid(beta * (logprobs[:, 0] - logprobs[:, 1])) - weight * logprobs[:, 0]
