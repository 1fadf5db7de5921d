"""How an objective's configuration says what rewards are divided by."""

from dataclasses import dataclass, field
from typing import ClassVar

from fastp3o.config import option
from fastp3o.objectives.config import OnlineConfig
from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler, Scaler


@dataclass(frozen=True, kw_only=True)
class RewardScalingConfig(OnlineConfig):
    """Of objectives that see rewards by their differences."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("reward_clip",)

    reward_scaling: str = field(
        default="difference",
        metadata={
            "help": "Divide rewards by the running standard deviation of the reward differences of a pair; absolute: "
            "of the rewards themselves (first author's code; breaks the invariance to shifts per prompt); none.",
            "choices": ["difference", "absolute", "none"],
        },
    )
    reward_clip: float = option(
        10.0,
        "Bound on scaled reward differences, or on scaled rewards with reward_scaling=absolute (first author: 10); "
        "0 for none.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.reward_clip >= 0, "reward_clip", "0 or more")


def scaler_of(config: RewardScalingConfig) -> Scaler:
    scaler = AbsoluteScaler if config.reward_scaling == "absolute" else DifferenceScaler
    return scaler(config.reward_clip, scale=config.reward_scaling != "none")
