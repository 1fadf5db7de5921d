"""Identity preference optimization (arXiv 2310.12036)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import ipo


@dataclass(frozen=True, kw_only=True)
class IPOConfig(PairConfig):
    """Identity preference optimization (arXiv 2310.12036): the difference of log-ratios is to be 1 / (2 tau).

    Log-ratios are means over a response's tokens, as the authors advise.
    """

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("tau",)
    per_token: ClassVar[bool] = True

    objective: str = objective_name("ipo")
    tau: float = option(
        0.1, "Tau: the difference of log-ratios per token that is aimed at is 1 / (2 tau) (paper: 0.1 to 1)."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.tau > 0, "tau", "above 0")

    def losses(self, pairs: Groups) -> Tensor:
        return ipo(self.logprobs(pairs), self.ref_logprobs(pairs), tau=self.tau)
