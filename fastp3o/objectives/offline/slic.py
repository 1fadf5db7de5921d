"""Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425)."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.offline.pairs import PairConfig
from fastp3o_kernels import Groups
from fastp3o_kernels.losses import slic


@dataclass(frozen=True, kw_only=True)
class SLiCConfig(PairConfig):
    """Sequence likelihood calibration (SLiC-HF, arXiv 2305.10425): a margin of log-probs, and fine-tuning."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("delta", "nll_weight")
    needs_reference: ClassVar[bool] = False

    objective: str = objective_name("slic")
    delta: float = option(
        1.0, "Delta: the margin of log-probs, in nats per response, beyond which a pair counts no more."
    )
    nll_weight: float = option(1.0, "Lambda, the weight of the chosen response's negative log-likelihood.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_at_least(0, "delta")
        self.check_at_least(0, "nll_weight")

    def losses(self, pairs: Groups) -> Tensor:
        return slic(self.logprobs(pairs), delta=self.delta, weight=self.nll_weight)
