"""Odds ratio preference optimization (arXiv 2403.07691)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import orpo


@dataclass(frozen=True, kw_only=True)
class ORPOConfig(PairConfig):
    """Odds ratio preference optimization (arXiv 2403.07691): fine-tuning and an odds ratio, without a reference."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("odds_weight",)
    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    objective: str = objective_name("orpo")
    odds_weight: float = option(
        0.1, "Lambda, the weight of the odds ratio beside the likelihood of the chosen (paper: 0.1)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(0, "odds_weight")

    def losses(self, pairs: Groups) -> Tensor:
        return orpo(self.logprobs(pairs), weight=self.odds_weight)
