"""What REINFORCE and its successors have in common: an advantage for each response, KL and entropy beside it.

P prompts with K responses each and n tokens of some of them.
"""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.config import option
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, SumOverProcesses
from fastp3o.objectives.groupwise import groupwise_loss
from fastp3o.objectives.kl_coefficient import KLCoefficient, KLConfig
from fastp3o.objectives.reward_scaling import RewardScalingConfig, scaler_of
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import k2, k3

IN_THE_LOSS = {"k2": k2, "k3": k3}
KL_ESTIMATOR = {
    "help": "k1: log π_old − log π_ref of a response, subtracted from its reward, so that scale_advantages divides by "
    "its deviation, too: where rewards are equal it decides alone, whatever kl_coef. k2, k3: Schulman's estimators, of "
    "each token, in the loss; k2's gradient is that of the KL, k3's of the opposite one.",
    "choices": ["k1", *IN_THE_LOSS],
}


@dataclass(frozen=True, kw_only=True)
class PolicyGradientConfig(RewardScalingConfig, KLConfig):
    """Advantages, KL and entropy."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("entropy_coef",)

    reward_scaling: str = field(
        default="none",
        metadata={
            "help": "Divide rewards by the running standard deviation of the reward differences of a pair "
            "(difference), of the rewards themselves (absolute), or not (none).",
            "choices": ["difference", "absolute", "none"],
        },
    )
    reward_clip: float = option(0.0, "Bound on scaled reward differences, or rewards; 0 for none.")
    kl_coef: float = option(0.05, "Beta, the weight of the KL to the reference.")
    kl_estimator: str = field(default="k1", metadata=KL_ESTIMATOR)
    entropy_coef: float = option(0.0, "Weight of an entropy bonus, of tokens averaged as in the loss, in nats.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_alone("kl_coef", "kl_estimator")
        self.check(self.entropy_coef >= 0, "entropy_coef", "0 or more")


@dataclass(frozen=True)
class AdvantageMicrobatch(Microbatch):
    """A packed row with what its responses are worth beside others."""

    advantages: Tensor  # [P, K] fp32


class PolicyGradient(Objective):
    """Half an objective: what is missing are advantages, and the losses that they weigh."""

    def __init__(self, config: PolicyGradientConfig, *, loss_mean: str):
        self.config, self.loss_mean = config, loss_mean
        self.averages_tokens = loss_mean == "token"
        self.scaler = scaler_of(config)
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    @abstractmethod
    def advantages(self, rewards: Tensor) -> Tensor:
        """Of the responses to some prompts, from their rewards: [P, K] -> [P, K]."""

    @abstractmethod
    def losses(self, groups: Groups) -> Tensor:
        """Of responses or pairs of them, [P, M], or of tokens, [n]. `groups` has `advantages` [P, K] and all that
        `groupwise_loss` gives.
        """

    @property
    def parts(self) -> dict[str, Stateful]:
        return super().parts | self.kl.parts

    @property
    def adapted(self) -> dict[str, float]:
        return self.kl.adapted

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """Adds advantages to every microbatch."""
        self.kl.adapt(minibatches, sum_over_processes)
        microbatches = [microbatch for minibatch in minibatches for microbatch in minibatch]
        advantages = iter(self.all_advantages(list(map(self.rewards, microbatches)), sum_over_processes))
        return [
            [AdvantageMicrobatch(**vars(microbatch), advantages=next(advantages)) for microbatch in minibatch]
            for minibatch in minibatches
        ]

    def rewards(self, microbatch: Microbatch) -> Tensor:
        """[P, K], less the KL where it is a part of them."""
        if self.config.kl_estimator != "k1":
            return microbatch.rewards
        return microbatch.rewards - self.kl.value * (microbatch.old_logprobs - microbatch.ref_logprobs)

    def all_advantages(self, rewards: list[Tensor], sum_over_processes: SumOverProcesses) -> list[Tensor]:
        """Of the responses of an update, in the same pieces."""
        return [self.advantages(part) for part in rewards]

    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = False) -> LossAndMetrics:
        tokens = max(1, microbatch.counted_tokens()) if self.averages_tokens else None
        return groupwise_loss(
            policy,
            microbatch,
            self.sums,
            of_responses={"advantages": cast(AdvantageMicrobatch, microbatch).advantages},
            outputs=("entropy",) if self.config.entropy_coef else (),
            divisor=tokens or len(microbatch.rewards),
            units=tokens or self.units(microbatch.counted_responses()).clamp(min=1),
        )

    def sums(self, groups: Groups) -> LossAndMetrics:
        """Of some prompts: the loss, and what is reported of it."""
        loss = self.total(groups, self.losses(groups), self.taking_part(groups))
        metrics = self.metrics(groups)
        if self.config.kl_estimator in IN_THE_LOSS and self.kl.value:
            estimates = IN_THE_LOSS[self.config.kl_estimator](groups.token_logprobs, groups["ref_tokens"])
            loss = loss + self.kl.value * self.total(groups, estimates)
            metrics[self.config.kl_estimator] = self.sum_for_mean(groups, estimates)
        if groups.entropy is not None:
            loss = loss - self.config.entropy_coef * self.total(groups, groups.entropy)
            metrics["policy_entropy"] = self.sum_for_mean(groups, groups.entropy)
        return loss, metrics

    def taking_part(self, groups: Groups) -> Tensor:
        """Which of the losses count, [P, M] bool; of responses where they are of tokens."""
        return groups["counted"]

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        """Sums for means over what counts, `sum_for_mean`."""
        return {}

    def sum_for_mean(self, groups: Groups, values: Tensor) -> Tensor:
        """Over what counts, whatever divides the loss: over tokens [n] where the loss averages them, or else over
        responses [P, K], where values of tokens count by their mean.
        """
        if self.averages_tokens:
            return values.where(groups.of_tokens(groups["counted"]), 0.0).sum()
        return (groups.means(values) if values.dim() == 1 else values).where(groups["counted"], 0.0).sum()

    def total(self, groups: Groups, values: Tensor, takes_part: Tensor | None = None) -> Tensor:
        """The sum over prompts of means over [P, M] values. Values of tokens, [n], become a response's by their mean
        (sequence), their sum (sum), or their sum over the longest response's length (constant); or what counts is the
        sum over all tokens (token).
        """
        takes_part = groups["counted"] if takes_part is None else takes_part
        if self.averages_tokens:
            return values.where(groups.of_tokens(takes_part), 0.0).sum()
        if values.dim() == 1:
            values = groups.means(values) if self.loss_mean == "sequence" else groups.sums(values)
            if self.loss_mean == "constant":
                values = values / self.config.max_response_tokens
        return values.where(takes_part, 0.0).mean(1).sum()
