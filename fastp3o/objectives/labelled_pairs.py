"""What objectives have in common that take of rewards only which of two is the higher: losses of chosen and rejected.

P prompts with K responses each, M = K (K − 1) / 2 pairs of them.
"""

from abc import abstractmethod

from torch import Tensor, nn

from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective
from fastp3o.objectives.config import OnlineConfig
from fastp3o.objectives.groupwise import groupwise_loss
from fastp3o.rewards.pairs import differences, pairs
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels.head.groups import Groups


class LabelledPairs(Objective):
    """The mean of a loss over all pairs of all prompts; equal rewards choose none and count as zero."""

    def __init__(self, config: OnlineConfig):
        self.config = config
        # The loss reads which reward is higher, nothing else.
        self.scaler = AbsoluteScaler(0.0, scale=False)

    @abstractmethod
    def losses(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """Of pairs, [n, 2] each -> [n]; column 0 is the chosen response."""

    @abstractmethod
    def anchor(self, groups: Groups) -> Tensor:
        """The log-probs of responses that the policy's are compared with, [P, K]."""

    def logprobs(self, groups: Groups) -> Tensor:
        """Of responses, [P, K]."""
        return groups.logprobs

    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = False) -> LossAndMetrics:
        return groupwise_loss(
            policy,
            microbatch,
            self.sums,
            divisor=len(microbatch.rewards),
            units=self.units(microbatch.counted_responses()).clamp(min=1),
        )

    def units(self, counted: Tensor) -> Tensor:
        """Pairs."""
        return pairs(counted).all(-1).sum()

    def sums(self, groups: Groups) -> LossAndMetrics:
        """Of some prompts: the loss, how many of the pairs that count the policy orders as the rewards do (a half where
        either is undecided), how many have equal rewards, and by how much log-ratios differ.
        """
        logprobs, anchor = self.logprobs(groups), self.anchor(groups)
        labels = differences(groups["rewards"]).sign()
        counts = pairs(groups["counted"]).all(-1)
        losses = self.losses(*(chosen_first(pairs(values), labels).flatten(0, 1) for values in (logprobs, anchor)))
        margins = labels * differences(logprobs.detach() - anchor)
        values = {
            "accuracy": (1 + margins.sign()) / 2,
            "tied": (labels == 0).float(),
            "margin": margins,
        }
        loss = losses.view_as(labels).where(counts & (labels != 0), 0.0).mean(1).sum()
        return loss, {name: value.where(counts, 0.0).sum() for name, value in values.items()}


def chosen_first(values: Tensor, labels: Tensor) -> Tensor:
    """Pairs [P, M, 2] in the order of chosen and rejected; labels [P, M] is −1 where the second is the chosen one."""
    return values.flip(-1).where(labels.unsqueeze(-1) < 0, values)
