"""Options of TRPO."""

from collections.abc import Mapping
from typing import ClassVar

from fastp3o.config import Condition, Needs, PrecisionName, option
from fastp3o.errors import UserError
from fastp3o.objectives.config.base import OnlineConfig
from fastp3o.objectives.config.ppo import CriticConfig

OTHERS = Condition(
    "objective",
    "another objective: --max_kl bounds a step of TRPO's policy, and --critic_learning_rate is its critic's",
    lambda _: False,
)


class TrustRegionConfig(CriticConfig):
    """TRPO's step: its bound on the KL, and how its direction and length are searched for."""

    max_kl: float = option(
        0.01,
        "Bound on an update's KL, in nats per token (TRPO's paper: 0.01).",
        above=0,
        changeable=True,
    )
    cg_steps: int = option(
        10,
        "Steps of the conjugate gradient method that solves for the direction (Spinning Up: 10).",
        at_least=1,
        changeable=True,
    )
    cg_damping: float = option(
        0.1,
        "Damping: added to the diagonal of the Fisher matrix (Spinning Up: 0.1).",
        at_least=0,
        changeable=True,
    )
    line_search_steps: int = option(
        10,
        "Maximum number of tries in the line search, each with 0.8 of the last step (Spinning Up: 10).",
        at_least=1,
        changeable=True,
    )


class TRPOConfig(TrustRegionConfig, OnlineConfig, objective="trpo"):
    """TRPO (arXiv 1502.05477): one step of the policy a round, within a KL of the policy before it,
    with PPO's critic.

    The policy's step has no learning rate. The optimizer, inner epochs and minibatches are the
    critic's.
    """

    objective_class: ClassVar[str] = "trpo:TRPO"
    further_needs: ClassVar[Mapping[str, Needs]] = {"learning_rate": OTHERS}
    precision: PrecisionName = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.precision != "fp32" or self.quantize == "8bit":
            raise UserError(
                "--objective trpo needs --precision fp32, and no --quantize 8bit, for small differences"
            )
        if self.ptx_data or self.sampler_ratio_cap or self.kl_per_update:
            raise UserError(
                "--objective trpo excludes --ptx_data, --sampler_ratio_cap and --kl_per_update"
            )
