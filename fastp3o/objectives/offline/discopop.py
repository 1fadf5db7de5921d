"""Discovered preference optimization (arXiv 2406.08414)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import discopop


@dataclass(frozen=True, kw_only=True)
class DiscoPOPConfig(PairConfig):
    """Discovered preference optimization (arXiv 2406.08414): a blend of logistic and exponential losses."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta", "tau")

    objective: str = objective_name("discopop")
    beta: float = option(0.05, "Beta: scale of the difference of log-ratios (paper: 0.05).")
    tau: float = option(0.05, "Tau: how wide the blend of the two losses is, in the scaled difference (paper: 0.05).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")
        self.check(self.tau > 0, "tau", "above 0")

    def losses(self, pairs: Groups) -> Tensor:
        return discopop(self.logprobs(pairs), self.ref_logprobs(pairs), beta=self.beta, tau=self.tau)
