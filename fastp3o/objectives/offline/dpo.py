"""Direct preference optimization (arXiv 2305.18290)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import dpo


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PairConfig):
    """Direct preference optimization (arXiv 2305.18290): logistic loss of the difference of log-ratios."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("beta", "label_smoothing")

    objective: str = objective_name("dpo")
    beta: float = option(0.1, "Beta: a larger one keeps the policy closer to the reference (paper: 0.1; 0.5 on TL;DR).")
    label_smoothing: float = option(0.0, "Probability that a label is wrong (conservative DPO, Mitchell 2023).")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.beta > 0, "beta", "above 0")
        self.check(0 <= self.label_smoothing < 0.5, "label_smoothing", "at least 0 and below 0.5")

    def losses(self, pairs: Groups) -> Tensor:
        return dpo(self.logprobs(pairs), self.ref_logprobs(pairs), beta=self.beta, label_smoothing=self.label_smoothing)
