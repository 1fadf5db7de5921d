"""Simple preference optimization (arXiv 2405.14734)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import simpo


@dataclass(frozen=True, kw_only=True)
class SimPOConfig(PairConfig):
    """Simple preference optimization (arXiv 2405.14734): no reference, log-probs per token, a target margin."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta", "gamma")
    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    objective: str = objective_name("simpo")
    beta: float = option(2.0, "Beta: scale of the difference of mean log-probs (paper: 2 to 2.5).")
    gamma: float = option(1.0, "Gamma: the margin that is aimed at, beta included (paper: 0.3 to 1.6).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")
        self.check_at_least(0, "gamma")

    def losses(self, pairs: Groups) -> Tensor:
        return simpo(self.logprobs(pairs), beta=self.beta, gamma=self.gamma)
