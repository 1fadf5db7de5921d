"""The numbers that define P3O's objective: defaults, meanings and bounds."""

from dataclasses import dataclass, field, fields
from math import inf
from typing import Any

from fastp3o_kernels.checks import check_number

CLIPPING = ("joint", "separate", "none", "token")
KL_REWARD = ("current", "rollout")

# Log-ratios are kept within this bound before `exp`: e^60 times any sensible advantage and cap is far from overflow.
LOG_RATIO_LIMIT = 60.0


def described(default: Any, help: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": help, **metadata})


@dataclass(frozen=True, kw_only=True)
class P3OSettings:
    """Settings of P3O's losses; `p3o_loss` has the formulas. Each field's metadata says what it means, for parsers.

    Raises:
        ValueError: for a value that is not allowed.
    """

    clipping: str = described(
        "joint",
        "joint (P3O-V2), separate (P3O-V1), none (the paper's ablation) or token (first author's variant).",
        choices=CLIPPING,
    )
    clip_range: float = described(0.2, "Epsilon of the clipping (paper: 0.2).")
    ratio_cap: float = described(10.0, "C: importance weights are kept within 1/C and C (first author: 10).")
    sampler_ratio_cap: float = described(
        2.0, "C of the truncated importance weights of pairs, where sampler_logprobs are given (common: 2)."
    )
    kl_coef: float = described(0.05, "Beta, the weight of the KL to the reference (first author: 0.05).")
    kl_reward: str = described(
        "current",
        "Policy in the KL part of the reward: current (first author's code) or rollout (the paper's box).",
        choices=KL_REWARD,
    )

    def __post_init__(self) -> None:
        for setting in fields(P3OSettings):
            choices, value = setting.metadata.get("choices"), getattr(self, setting.name)
            if choices and value not in choices:
                raise ValueError(f"{setting.name} must be one of {', '.join(choices)}, got {value!r}")
            if not choices:
                check_number(setting.name, value)
        if not self.clip_range > 0:
            raise ValueError(f"clip_range must be above 0, got {self.clip_range}")
        if not self.ratio_cap >= 1:
            raise ValueError(f"ratio_cap must be at least 1, got {self.ratio_cap}")
        if not self.sampler_ratio_cap >= 1:
            raise ValueError(f"sampler_ratio_cap must be at least 1, got {self.sampler_ratio_cap}")
        if not 0 <= self.kl_coef < inf:
            raise ValueError(f"kl_coef must be 0 or more and finite, got {self.kl_coef}")


DEFAULTS = P3OSettings()
