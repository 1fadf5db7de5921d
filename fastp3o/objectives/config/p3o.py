"""Options of P3O and PPG."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from fastp3o.config import Needs, option
from fastp3o.errors import UserError
from fastp3o.objectives.config.base import (
    ONE_STEP_RATE,
    KLConfig,
    OnlineConfig,
    RewardScalingConfig,
    SamplerCorrectionConfig,
)


class PairRatioConfig(RewardScalingConfig, KLConfig, SamplerCorrectionConfig):
    """P3O's loss: ratios of the two responses of a pair, which are clipped, and the KL."""

    clipping: Literal["joint", "separate", "none", "token"] = option(
        "joint",
        "How ratios are clipped. joint: the pair's two ratios together (P3O-V2). separate: each response's ratio "
        "alone (P3O-V1). token: each token's ratio (the first author's variant). none: no clipping (the paper's "
        "ablation).",
    )
    clip_range: float = option(
        0.2,
        "Clipping epsilon: ratios count within 1 - epsilon and 1 + epsilon (paper: 0.2).",
        above=0,
        changeable=True,
    )
    ratio_cap: float = option(
        10.0, "C: importance weights are kept within 1/C and C (first author: 10).", at_least=1
    )
    kl_coef: float = option(
        0.05,
        "Beta, the weight of the KL to the reference (first author: 0.05); 0 disables the penalty.",
        at_least=0,
        changeable=True,
    )
    kl_reward: Literal["current", "rollout"] = option(
        "current",
        "Policy in the KL part of the reward. current: the one that trains (first author's code). rollout: the one "
        "that sampled (the box in the paper).",
    )
    pair_weights: Literal["means", "comparisons"] = option(
        "comparisons",
        "Weight of a pair where the reward compares responses; no effect on rewards that score. comparisons: the "
        "pair's comparison itself. means: the difference of the two responses' row means over all their comparisons.",
    )


class P3OConfig(PairRatioConfig, OnlineConfig, objective="p3o"):
    """P3O (arXiv 2310.00212): clipped differences of rewards.

    Batch sizes follow our benchmark study; all other defaults follow the first author's code.
    """

    objective_class: ClassVar[str] = "p3o:P3O"
    further_needs: ClassVar[Mapping[str, Needs]] = {
        "clip_range": ("clipping=joint", "clipping=separate", "clipping=token")
    }
    learning_rate: float = 0.0


class PPGConfig(P3OConfig, objective="ppg"):
    """PPG (arXiv 2310.00212, equation 6): P3O's gradient before clipping; one step a round."""

    further_needs: ClassVar[Mapping[str, Needs]] = {}  # `__post_init__` says what must stay
    clipping: Literal["none"] = option(
        "none", "none: the gradient is on-policy, so there is nothing to clip."
    )
    learning_rate: float = ONE_STEP_RATE
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {
            name: getattr(P3OConfig, name) for name in ("clip_range", "ratio_cap", "kl_reward")
        }
        fixed |= {
            "old_logprobs": "policy",
            "inner_epochs": 1,
            "prompts_per_minibatch": self.prompts_per_update,
        }
        if wrong := {name: value for name, value in fixed.items() if getattr(self, name) != value}:
            problems = (
                f"--{name} must be {value}, got {getattr(self, name)}"
                for name, value in wrong.items()
            )
            raise UserError(
                f"{'; '.join(problems)}: the gradient is on-policy, so a round has one step (p3o has more)"
            )
