"""The numbers that define P3O's objective, with defaults, meanings and bounds, and the numbers that
come out of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from math import inf
from typing import Any, Literal, NamedTuple, TypeVar, cast

from torch import Tensor

from fastp3o_kernels.checks import checked_number

Loss = TypeVar("Loss", bound=Callable[..., Any])

CHOICES = {"clipping": ("joint", "separate", "none", "token"), "kl_reward": ("current", "rollout")}

# Log-ratios are kept within this bound before `exp`: e^60 times any sensible advantage and cap is
# far from overflow.
LOG_RATIO_LIMIT = 60.0

# How many pairs count, their responses, the prompts of these, and the cases of clipping: pairs,
# responses or tokens.
COUNTS = ("pairs", "responses", "prompts", "cases")
# The count that each metric is a mean over; None for a maximum.
METRICS = {
    "ratio_mean": "responses",
    "ratio_max": None,
    "clip_fraction": "cases",
    "advantage_mean_abs": "pairs",
    "zero_gradient_fraction": "prompts",
    "kl": "responses",
}
# Further metrics where pairs have importance weights.
SAMPLER_METRICS = {"sampler_ratio_mean": "pairs", "sampler_ratio_capped": "pairs"}


@dataclass(frozen=True, kw_only=True)
class P3OSettings:
    """Settings of P3O's losses; `p3o_loss` has the formulas.

    clipping: joint (P3O-V2), separate (P3O-V1), none (the paper's ablation) or token (first
    author's variant). clip_range: ε of the clipping (paper: 0.2). ratio_cap: C, importance weights
    are kept within 1/C and C (first author: 10). sampler_ratio_cap: C of the truncated importance
    weights of pairs, where sampler_logprobs are given (common: 2). kl_coef: β, the weight of the KL
    to the reference (first author: 0.05). kl_reward: the policy in the KL part of the reward,
    current (first author's code) or rollout (the paper's box).

    Raises ValueError for a value that is not allowed.
    """

    clipping: Literal["joint", "separate", "none", "token"] = "joint"
    clip_range: float = 0.2
    ratio_cap: float = 10.0
    sampler_ratio_cap: float = 2.0
    kl_coef: float = 0.05
    kl_reward: Literal["current", "rollout"] = "current"

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name not in CHOICES:
                object.__setattr__(self, name, checked_number(name, value))
            elif value not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {', '.join(CHOICES[name])}, got {value!r}")
        if not self.clip_range > 0:
            raise ValueError(f"clip_range must be above 0, got {self.clip_range}")
        if not self.ratio_cap >= 1:
            raise ValueError(f"ratio_cap must be at least 1, got {self.ratio_cap}")
        if not self.sampler_ratio_cap >= 1:
            raise ValueError(f"sampler_ratio_cap must be at least 1, got {self.sampler_ratio_cap}")
        if not 0 <= self.kl_coef < inf:
            raise ValueError(f"kl_coef must be 0 or more and finite, got {self.kl_coef}")


DEFAULTS = P3OSettings()


def check_settings(settings: object) -> None:
    """Raises ValueError for anything but P3OSettings, such as a dict of them."""
    if not isinstance(settings, P3OSettings):
        raise ValueError(
            f"settings must be P3OSettings(clipping=..., ...), got {type(settings).__name__}"
        )


def hints_at_settings(loss: Loss) -> Loss:
    """The same loss, whose TypeError for an unexpected keyword names the settings, since most such
    keywords are P3O's hyperparameters.
    """
    keywords, settings = signature(loss).parameters, ", ".join(vars(DEFAULTS))

    @wraps(loss)
    def hinting(*args: Any, **kwargs: Any) -> Any:
        if unknown := [name for name in kwargs if name not in keywords]:
            raise TypeError(
                f"{loss.__name__}() got an unexpected keyword argument {unknown[0]!r}; P3O's hyperparameters go "
                f"into settings=P3OSettings(...): {settings}"
            )
        return loss(*args, **kwargs)

    return cast(Loss, hinting)


class P3OLossOutput(NamedTuple):
    """A loss, its metrics, and how many things each metric is a mean over.

    loss: 0-d, differentiable.
    metrics: detached 0-d tensors, never read by the host inside an operation; means over the pairs
        that count, their responses or the tokens of these, whatever the divisor, and 0 where no
        pair counts: ratio_mean, ratio_max: of π/π_old over the responses; clip_fraction: share
        outside the clip range: of pairs (joint; also reported by none, which clips nothing), of
        responses (separate) or of tokens (token); advantage_mean_abs: mean |q| over pairs;
        zero_gradient_fraction: share of prompts none of whose responses' tokens has a gradient; kl:
        mean over responses of log π − log π_ref, in nats; sampler_ratio_mean, sampler_ratio_capped:
        only where sampler_logprobs were given: the mean of the pairs' importance weights, and the
        share of them that is at its cap.
    counts: by metric, but ratio_max, how many responses, pairs, prompts, tokens it is a mean over:
        0-d, fp32, on the device. The metric of several batches is the sum of metric times count
        over the sum of counts.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    counts: dict[str, Tensor]


def truncated_ratios(log_ratios: Tensor, cap: float) -> Tensor:
    """min(π_old / μ, C), constants that weigh the losses of what μ sampled in the place of the old
    policy; any shape.

    log_ratios: log π_old − log μ. μ is the old policy in another engine or precision, or an older
    one. Since E_π_old[f(y)] = E_μ[π_old(y) / μ(y) f(y)], losses of whole responses are weighed by
    ratios of these, and losses of pairs by the product of their two, a sum of log-ratios. The cap C
    bounds the variance and biases towards μ (truncated importance sampling, Ionides 2008). Losses
    of tokens are weighed by the ratio of each token alone (Yao et al. 2025, "Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training"). That leaves the tokens before it as μ
    sampled them, for far less variance.
    """
    return log_ratios.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
