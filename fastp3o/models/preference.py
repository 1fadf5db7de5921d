"""Preference models: each response has a vector v, and P(y ≻ y′) = σ(vᵀ R v′) (Zhang et al., arXiv
2410.02197).

R is fixed, skew-symmetric and block diagonal, with blocks [[0, 1], [−1, 0]]: vᵀ R v′ = Σ (v₀ v′₁ −
v₁ v′₀) over the blocks. Preferences may go in circles, and cost one pass a response, not one a
pair. Bradley and Terry's model is the case of one block with v = (r, 1).

The paper divides vectors by their length and chooses a temperature. Here lengths are learned: unit
vectors hold a Bradley-Terry model only nearly, and their temperature bounds every probability. In a
small trial (a circle of three kinds, three rates, four seeds) 6 of 12 runs with learned lengths
found the circle, all four at the lowest rate, and none of 12 with unit vectors and a temperature of
0.1.
"""

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

MARKER = "fastp3o_preference_dim"  # in a saved model's configuration: the size of the vectors


def preference_dim(config: PretrainedConfig) -> int:
    """The size of a preference model's vectors; 0 for every other model."""
    return int(getattr(config, MARKER, 0))


def begin_head(head: nn.Linear) -> None:
    """Gives a new head of vectors its first weights: the first row of each block is zero, so that
    all preferences begin at ½; the second one is random, since the gradient of two zeros would be
    zero. Weights [2k, D].
    """
    nn.init.normal_(head.weight, std=head.in_features**-0.5)
    with torch.no_grad():
        head.weight[0::2] = 0
        if head.bias is not None:
            head.bias.zero_()


def log_odds(first: Tensor, second: Tensor) -> Tensor:
    """vᵀ R v′ = log P(first ≻ second) − log P(second ≻ first), in the vectors' dtype: [..., 2k],
    [..., 2k] -> [...]. Swapped arguments give the negative, to the bit: products commute, and
    rounding is symmetric.
    """
    return (first[..., 0::2] * second[..., 1::2] - first[..., 1::2] * second[..., 0::2]).sum(-1)


def log_odds_of_groups(vectors: Tensor) -> Tensor:
    """The log-odds of each response over each other one of its group, skew-symmetric to the bit:
    [P, K, 2k] -> [P, K, K].
    """
    return mirrored(log_odds(vectors[:, :, None], vectors[:, None, :]))


def leads_of_groups(vectors: Tensor) -> Tensor:
    """P(response i ≻ response j) − ½ for the responses of each group, skew-symmetric to the bit:
    [P, K, 2k] -> [P, K, K].
    """
    return mirrored(torch.tanh(log_odds(vectors[:, :, None], vectors[:, None, :]) / 2) / 2)


def mirrored(tables: Tensor) -> Tensor:
    """The skew-symmetric tables [P, K, K] with these upper triangles."""
    above = tables.triu(1)
    return above - above.transpose(1, 2)
