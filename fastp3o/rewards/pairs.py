"""All pairs of the responses to a prompt, whose differences of rewards P3O follows."""

import torch
from torch import Tensor


def pairs(values: Tensor) -> Tensor:
    """(v_i, v_j) of all i < j, [P, K] -> [P, K (K − 1) / 2, 2]."""
    K = values.shape[1]
    return values[:, torch.triu_indices(K, K, offset=1).T]


def differences(values: Tensor) -> Tensor:
    """v_i − v_j of all i < j, [P, K] -> [P, K (K − 1) / 2]."""
    first, second = pairs(values).unbind(-1)
    return first - second
