"""Odds ratio preference optimization (arXiv 2403.07691)."""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def orpo(mean_logprobs: Tensor, *, weight: float = 0.1) -> Tensor:
    """NLL of the chosen response − λ log σ(log odds_chosen − log odds_rejected), [P, 2] -> [P] (equation 6).

    mean_logprobs: means over the tokens of each response; column 0 is the chosen one. A response's probability in its
    odds p / (1 − p) is the geometric mean of its tokens'. weight: λ.
    """
    log_odds = mean_logprobs - log1mexp(mean_logprobs)
    return -mean_logprobs[:, 0] - weight * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def log1mexp(logprobs: Tensor) -> Tensor:
    """log(1 − e^x), x < 0, in two forms, each where it loses no digits (Mächler, "Accurately computing
    log(1 − exp(−|a|))", 2012). A probability that rounds to 1 counts as the largest below.
    """
    logprobs = logprobs.clamp(max=-torch.finfo(logprobs.dtype).eps)
    near = logprobs > -math.log(2)
    # Each form gets what is harmless to it where the other is taken, or its gradient there would be NaN.
    by_expm1 = (-torch.expm1(logprobs.where(near, -1.0))).log()
    by_log1p = torch.log1p(-logprobs.where(~near, -1.0).exp())
    return torch.where(near, by_expm1, by_log1p)
