"""Nash-MD (arXiv 2312.00886): each response against one of the geometric mixture of policy and reference.

A prompt's first K / 2 responses are the policy's, and learn; the others are the mixture's, and are what they are
compared with. P(y ≻ y′) is σ(r(y) − r(y′)), as in the Bradley–Terry model of a reward model's scores.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from fastp3o.config import objective_name, option
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective
from fastp3o.objectives.groupwise import groupwise_loss
from fastp3o.objectives.mixture import MixtureConfig
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import nash_md


@dataclass(frozen=True, kw_only=True)
class NashMDConfig(MixtureConfig):
    """Nash-MD (arXiv 2312.00886): towards what is preferred to responses of a mixture with the reference."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("tau",)

    objective: str = objective_name("nash_md")
    mixture: float = option(0.125, "Beta: the reference's share in the mixture pi^(1 - beta) pi_ref^beta.")
    tau: float = option(0.1, "Weight of the KL to the reference.")
    inner_epochs: int = option(1, "Passes over each round's rollouts; the loss is on-policy in the first step alone.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.mixture > 0, "mixture", "above 0 and at most 1")
        self.check(self.tau >= 0, "tau", "0 or more")
        self.check(self.responses_per_prompt % 2 == 0, "responses_per_prompt", "even: half are the mixture's")

    @property
    def from_mixture(self) -> int:
        return self.responses_per_prompt // 2

    def build(self) -> "NashMD":
        return NashMD(self)


class NashMD(Objective):
    """−(P(y ≻ y′) − ½ − τ log π/π_ref(y)) log π(y), the mean over a prompt's y, P the mean over its y′."""

    def __init__(self, config: NashMDConfig):
        self.config = config
        self.scaler = AbsoluteScaler(0.0, scale=False)

    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = False) -> LossAndMetrics:
        units = self.units(microbatch.counted_responses()).clamp(min=1)
        return groupwise_loss(policy, microbatch, self.sums, divisor=len(microbatch.rewards), units=units)

    def units(self, counted: Tensor) -> Tensor:
        """The policy's own responses."""
        return counted[:, : self.config.from_mixture].sum()

    def sums(self, groups: Groups) -> LossAndMetrics:
        own = slice(self.config.from_mixture)
        counted = groups["counted"][:, own]
        preferred = preferences(groups["rewards"], self.config.from_mixture)
        losses = nash_md(groups.logprobs[:, own], groups["ref"][:, own], preferred, tau=self.config.tau)
        return losses.where(counted, 0.0).mean(1).sum(), {"preferred": preferred.where(counted, 0.0).sum()}


def preferences(rewards: Tensor, count: int) -> Tensor:
    """P(y ≻ y′) of the first `count` responses, the mean over the others: [P, K] -> [P, count]."""
    own, others = rewards[:, :count], rewards[:, count:]
    return (own.unsqueeze(2) - others.unsqueeze(1)).sigmoid().mean(2)
