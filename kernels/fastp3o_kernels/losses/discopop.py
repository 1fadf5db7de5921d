"""Discovered preference optimization: the log-ratio modulated loss (arXiv 2406.08414)."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from fastp3o_kernels.losses.dpo import preference


def discopop(logprobs: Tensor, ref_logprobs: Tensor, *, beta: float = 0.05, tau: float = 0.05) -> Tensor:
    """(1 − m) (−log σ(β Δ)) + m e^(−β Δ), m = σ(β Δ / τ), [P, 2] -> [P] (equation 5 of the paper).

    Column 0 is the chosen response. Not convex: where Δ is slightly below 0, the blend has a bump.
    """
    difference = beta * preference(logprobs, ref_logprobs)
    # m e^(−β Δ) in one exponential: far below 0 the one factor is 0 and the other infinite.
    exponential = torch.exp(logsigmoid(difference / tau) - difference)
    return (-difference / tau).sigmoid() * -logsigmoid(difference) + exponential
