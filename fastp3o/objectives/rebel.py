"""Regression to relative rewards (REBEL, arXiv 2404.16767): log-ratios of pairs become their differences of rewards."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.policy_gradient import PolicyGradient, PolicyGradientConfig
from fastp3o.rewards.pairs import pairs
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import rebel


@dataclass(frozen=True, kw_only=True)
class REBELConfig(PolicyGradientConfig):
    """REBEL (arXiv 2404.16767): a quadratic step from the policy that sampled."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("eta",)

    objective: str = objective_name("rebel")
    eta: float = option(1.0, "Size of the step: log-ratios of pairs are drawn to eta times the difference of rewards.")
    kl_coef: float = option(0.0, "Beta, the weight of the KL to the reference, beside the step's own to the old one.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.eta > 0, "eta", "above 0")

    def build(self) -> "REBEL":
        return REBEL(self, loss_mean="sum")


class REBEL(PolicyGradient):
    """The square of each pair's distance, the mean over pairs."""

    config: REBELConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        return rewards

    def losses(self, groups: Groups) -> Tensor:
        """Of pairs."""
        logprobs, old, rewards = map(pairs, (groups.logprobs, groups["old"], groups["advantages"]))
        losses = rebel(logprobs.flatten(0, 1), old.flatten(0, 1), rewards.flatten(0, 1), eta=self.config.eta)
        return losses.view(logprobs.shape[:2])

    def taking_part(self, groups: Groups) -> Tensor:
        return pairs(groups["counted"]).all(-1)
