"""The numbers that define the objective, and what a loss returns."""

from typing import NamedTuple

from torch import Tensor

# Log-ratios are kept within this bound before `exp`: e^60 times any sensible advantage and cap is far from overflow.
LOG_RATIO_LIMIT = 60.0

METRICS = (
    "ratio_mean",
    "ratio_max",
    "clip_fraction",
    "advantage_mean_abs",
    "zero_gradient_fraction",
    "kl",
)


class Objective(NamedTuple):
    """The objective's settings, in the names of the public functions, which explain them."""

    clipping: str
    clip_range: float
    ratio_cap: float
    kl_coef: float
    kl_reward: str


class P3OLossOutput(NamedTuple):
    """A loss and what to watch beside it.

    loss: 0-d, differentiable.
    metrics: detached 0-d tensors, never read by the host inside an operation:
        ratio_mean, ratio_max: of π/π_old over the responses;
        clip_fraction: share outside the clip range: of pairs (joint; also reported by none, which clips nothing), of
            responses (separate) or of tokens (token);
        advantage_mean_abs: mean |q| over pairs;
        zero_gradient_fraction: share of prompts none of whose responses' tokens has a gradient;
        kl: mean over responses of log π − log π_ref, in nats.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
