"""Online IPO (arXiv 2310.12036; online, Calandriello et al. 2024): a margin of log-ratios, not as much as possible."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.labelled_pairs import LabelledPairs
from fastp3o.objectives.mixture import MixtureConfig
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import ipo


@dataclass(frozen=True, kw_only=True)
class OnlineIPOConfig(MixtureConfig):
    """Online IPO (arXiv 2403.08635): a distance of 1 / (2 tau) between log-ratios; IPO-MD with --mixture."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("tau",)

    objective: str = objective_name("online_ipo")
    tau: float = option(
        0.1, "Weight of the KL to the reference; log-ratios count by the token, as IPO's authors advise."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.tau > 0, "tau", "above 0")

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt if self.mixture else 0

    def build(self) -> "OnlineIPO":
        return OnlineIPO(self)


class OnlineIPO(LabelledPairs):
    """(Δ − 1 / (2 τ))², Δ the difference of the means of log π/π_ref over a response's tokens."""

    config: OnlineIPOConfig

    def logprobs(self, groups: Groups) -> Tensor:
        return groups.means(groups.token_logprobs)

    def anchor(self, groups: Groups) -> Tensor:
        return groups["ref"] / groups.lengths.clamp(min=1)

    def losses(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return ipo(logprobs, ref_logprobs, tau=self.config.tau)
