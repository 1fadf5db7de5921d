"""Anchored preference optimization (arXiv 2408.06266)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import apo_down, apo_zero


@dataclass(frozen=True, kw_only=True)
class APOZeroConfig(PairConfig):
    """APO-zero (arXiv 2408.06266): chosen likelier, rejected less. For data better than the policy's own."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta",)

    objective: str = objective_name("apo_zero")
    beta: float = option(0.1, "Beta: scale of the log-ratios (paper: 0.1).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")

    def losses(self, pairs: Groups) -> Tensor:
        return apo_zero(self.logprobs(pairs), self.ref_logprobs(pairs), beta=self.beta)


@dataclass(frozen=True, kw_only=True)
class APODownConfig(PairConfig):
    """APO-down (arXiv 2408.06266): both less likely, rejected more so. For data worse than the policy's own."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta",)

    objective: str = objective_name("apo_down")
    beta: float = option(0.1, "Beta: scale of the log-ratios (paper: 0.1).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")

    def losses(self, pairs: Groups) -> Tensor:
        return apo_down(self.logprobs(pairs), self.ref_logprobs(pairs), beta=self.beta)
