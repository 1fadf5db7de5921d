"""Contrastive preference optimization (arXiv 2401.08417)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import cpo


@dataclass(frozen=True, kw_only=True)
class CPOConfig(PairConfig):
    """Contrastive preference optimization (arXiv 2401.08417): DPO without a reference, and fine-tuning."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta", "nll_weight")
    needs_reference: ClassVar[bool] = False

    objective: str = objective_name("cpo")
    beta: float = option(0.1, "Beta: scale of the difference of log-probs (paper: 0.1).")
    nll_weight: float = option(1.0, "Weight of the chosen response's negative log-likelihood (paper: 1).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")
        self.check_at_least(0, "nll_weight")

    def losses(self, pairs: Groups) -> Tensor:
        return cpo(self.logprobs(pairs), beta=self.beta, weight=self.nll_weight)
