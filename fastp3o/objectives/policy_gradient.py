"""Policy gradients with an advantage for each response: REINFORCE, RLOO, GRPO and its kin, REBEL,
CoPG and OAPL.

They differ in the advantages, the clipping of the ratios, and the divisor of the sum over tokens.

Shapes: P prompts with K responses each, n tokens of some of these prompts.
"""

from abc import abstractmethod
from collections.abc import Callable
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor, nn

from fastp3o.objectives.base import (
    GroupwiseObjective,
    LossAndMetrics,
    Minibatches,
    SumOverProcesses,
    masked_tokens,
    sampler_log_ratios,
    sampler_ratio_metrics,
    with_count,
)
from fastp3o.objectives.config import policy_gradient as configs
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import AbsoluteScaler, pairs, scaler_of_differences
from fastp3o_kernels import Groups
from fastp3o_kernels import losses as formulas

TOKEN_KL = {"k2": formulas.k2, "k3": formulas.k3}


class PolicyGradient(GroupwiseObjective):
    """Subclasses define the advantages and the losses that these weigh. loss_mean: how the losses
    of tokens are averaged, see `total`.
    """

    kl: KLCoefficient
    loss_mean: str = "sum"

    def __init__(self, config: configs.PolicyGradientConfig):
        self.config, self.sampler_ratio_cap = config, config.sampler_ratio_cap
        self.outputs = ("entropy",) if config.entropy_coef else ()
        self.scaler = scaler_of_differences(config.reward_scaling, config.reward_clip)
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return masked_tokens(row, loss_mask) if self.loss_mean == "token" else len(row.groups)

    @property
    def subtracts_kl(self) -> bool:
        """Whether rewards are less the KL of the old policy, the estimator k1."""
        return self.config.kl_estimator == "k1" and self.kl.value != 0

    def less_kl(self, rewards: Tensor, old: Tensor, ref: Tensor) -> Tensor:
        """Rewards less the KL by k1, all [P, K]. old, ref: log-probs of responses."""
        return rewards - self.kl.value * (old - ref)

    def advantages(self, rewards: Tensor) -> Tensor:
        """Advantages of the responses to some prompts, or rewards that `losses` compares: [P, K] ->
        [P, K].
        """
        return rewards

    @abstractmethod
    def losses(self, groups: Groups) -> Tensor:
        """Losses of responses or of pairs of them, [P, M], or of tokens, [n]; `groups` has
        `advantages`, too.
        """

    def sampler_log_ratios(self, groups: Groups) -> Tensor:
        """log π_old − log μ of what has a loss in `losses`, μ what sampled: by default of whole
        responses, [P, K].
        """
        return groups.sums(sampler_log_ratios(groups))

    def sums(self, groups: Groups) -> LossAndMetrics:
        rewards = groups["rewards"]
        if self.subtracts_kl:
            rewards = self.less_kl(rewards, groups["old"], groups["ref"])
        groups = groups.having(advantages=self.advantages(rewards))
        losses, metrics = self.losses(groups), self.metrics(groups)
        weights: dict[str, Tensor] = {}
        if self.sampler_ratio_cap:
            ratios = formulas.truncated_ratios(
                self.sampler_log_ratios(groups), self.sampler_ratio_cap
            )
            losses = losses * ratios
            weights = self.sampler_metrics(
                groups, sampler_ratio_metrics(ratios, self.sampler_ratio_cap)
            )
        loss = self.total(groups, losses, self.takes_part(groups))
        if self.config.kl_estimator in TOKEN_KL and self.kl.value:
            estimates = TOKEN_KL[self.config.kl_estimator](
                groups.token_logprobs, groups["ref_tokens"]
            )
            loss = loss + self.kl.value * self.total(groups, estimates, groups["loss_mask"])
            metrics[self.config.kl_estimator] = self.metric_sum(groups, estimates)
        if groups.entropy is not None:
            loss = loss - self.config.entropy_coef * self.total(
                groups, groups.entropy, groups["loss_mask"]
            )
            metrics["policy_entropy"] = self.metric_sum(groups, groups.entropy)
        return loss, self.counted(groups, metrics) | weights

    def takes_part(self, groups: Groups) -> Tensor:
        """[P, M] bool: the losses that count. Losses of tokens count with their response, [P, K]."""
        return groups["loss_mask"]

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        """Further metrics, each a `metric_sum`."""
        return {}

    def sampler_metrics(self, groups: Groups, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Metrics from the importance weights of `losses`."""
        return self.counted(
            groups, {name: self.metric_sum(groups, value) for name, value in values.items()}
        )

    def counted(self, groups: Groups, sums: dict[str, Tensor]) -> dict[str, Tensor]:
        loss_mask = groups["loss_mask"]
        return with_count(
            sums, (groups.lengths * loss_mask if self.loss_mean == "token" else loss_mask).sum()
        )

    def metric_sum(self, groups: Groups, values: Tensor) -> Tensor:
        """The sum over what counts: tokens, if the loss averages these, or responses, of [P, K] or
        the means of [n].
        """
        if self.loss_mean == "token":
            return values.where(groups.per_token(groups["loss_mask"]), 0.0).sum()
        return (
            (groups.means(values) if values.dim() == 1 else values)
            .where(groups["loss_mask"], 0.0)
            .sum()
        )

    def total(self, groups: Groups, values: Tensor, takes_part: Tensor) -> Tensor:
        """The sum over prompts of the means over [P, M] values, which are 0 if they take no part.
        Values of tokens, [n], become a response's by loss_mean: their mean (sequence), their sum
        (sum), or their sum divided by max_response_tokens (constant). With loss_mean "token" it is
        the sum over all tokens instead.
        """
        if self.loss_mean == "token":
            return values.where(groups.per_token(takes_part), 0.0).sum()
        if values.dim() == 1:
            values = groups.means(values) if self.loss_mean == "sequence" else groups.sums(values)
            if self.loss_mean == "constant":
                values = values / self.config.max_response_tokens
        return values.where(takes_part, 0.0).mean(1).sum()


# --- Clipped ratios, as PPO's, with the advantage of a response.


class Clipped(PolicyGradient):
    """max(−A ρ, −A clip ρ) of tokens, or of what `compared` has."""

    config: configs.RatioConfig
    formula: ClassVar[Callable[..., Tensor]] = staticmethod(formulas.ppo_clip)

    def compared(self, groups: Groups) -> tuple[Tensor, Tensor]:
        """Log-probs whose ratio is clipped, and the old ones: of tokens, [n], or of responses, [P,
        K].
        """
        return groups.token_logprobs, groups["old_tokens"]

    def losses(self, groups: Groups) -> Tensor:
        logprobs, old = self.compared(groups)
        advantages = (
            groups.per_token(groups["advantages"]) if logprobs.dim() == 1 else groups["advantages"]
        )
        low, high = self.config.clip_low, self.config.clip_high
        return self.formula(logprobs, old, advantages, clip_low=low, clip_high=high)

    def sampler_log_ratios(self, groups: Groups) -> Tensor:
        """log π_old − log π_sampler of tokens, [n], or of whole responses, [P, K], which are
        sampled as a whole also where means are clipped.
        """
        of_tokens = self.compared(groups)[0].dim() == 1
        return sampler_log_ratios(groups) if of_tokens else super().sampler_log_ratios(groups)

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        logprobs, old = self.compared(groups)
        ratios = formulas.bounded_exp(logprobs.detach() - old)
        outside = (ratios < 1 - self.config.clip_low) | (ratios > 1 + self.config.clip_high)
        values = {"ratio_mean": ratios, "clip_fraction": outside.to(ratios.dtype)}
        return {name: self.metric_sum(groups, value) for name, value in values.items()}


class RLOO(Clipped):
    """−A log π(y|x), the policy's gradient while it is the one that sampled, or clipped ratios of
    responses or tokens. A is the reward less the mean of the prompt's other responses (Kool et al.
    2019).
    """

    config: configs.RLOOConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        return formulas.rloo_advantages(rewards)

    def clip_range(self, length: float) -> float | None:
        return (
            min(self.config.clip_low, self.config.clip_high)
            if self.config.clipping == "response"
            else None
        )

    def compared(self, groups: Groups) -> tuple[Tensor, Tensor]:
        return (
            super().compared(groups)
            if self.config.clipping == "token"
            else (groups.logprobs, groups["old"])
        )

    def losses(self, groups: Groups) -> Tensor:
        if self.config.clipping == "none":
            return formulas.reinforce(groups.logprobs, groups["advantages"])
        return super().losses(groups)

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        return {} if self.config.clipping == "none" else super().metrics(groups)


class REINFORCE(RLOO):
    """−A log π(y|x), A the reward less the mean over the update, which is `baseline`."""

    baseline: float

    def __init__(self, config: configs.REINFORCEConfig):
        super().__init__(config)
        self.scaler = AbsoluteScaler(config.reward_clip, scale=config.reward_scaling == "absolute")

    @property
    def reads_old_first(self) -> bool:
        """The baseline has the KL of the whole update."""
        return super().reads_old_first or self.subtracts_kl

    def advantages(self, rewards: Tensor) -> Tensor:
        return rewards - self.baseline

    def prepare(
        self, policy: nn.Module, minibatches: Minibatches, sum_over_processes: SumOverProcesses
    ) -> Minibatches:
        minibatches = super().prepare(policy, minibatches, sum_over_processes)
        batches = list(chain.from_iterable(minibatches))
        rewards = torch.cat([microbatch.rewards for microbatch in batches])
        if self.subtracts_kl:
            old = torch.cat([microbatch.old_logprobs for microbatch in batches])
            rewards = self.less_kl(
                rewards, old, torch.cat([microbatch.ref_logprobs for microbatch in batches])
            )
        rewards = rewards.double()
        total, count = sum_over_processes(
            torch.stack([rewards.sum(), rewards.new_full((), rewards.numel())])
        ).tolist()
        self.baseline = total / count
        return minibatches


class GRPO(Clipped):
    """Ratios of tokens. GRPO's kin are configurations of it; every setting is an option of each."""

    config: configs.ClippedConfig

    def __init__(self, config: configs.ClippedConfig):
        super().__init__(config)
        self.loss_mean = (
            config.loss_mean if isinstance(config, configs.TokenMeanConfig) else "sequence"
        )

    def advantages(self, rewards: Tensor) -> Tensor:
        return formulas.group_advantages(rewards, scale=self.config.scale_advantages)


class GSPO(GRPO):
    """One clipped ratio for each response, the geometric mean of its tokens' ratios."""

    def clip_range(self, length: float) -> float | None:
        """The log-ratio of a response is that of the mean over its tokens, times their number."""
        return length * min(self.config.clip_low, self.config.clip_high)

    def compared(self, groups: Groups) -> tuple[Tensor, Tensor]:
        return groups.means(groups.token_logprobs), groups.means(groups["old_tokens"])


class CISPO(GRPO):
    """Clipped ratios of tokens are constants that weigh log π."""

    formula = staticmethod(formulas.cispo)


class SAPO(PolicyGradient):
    """A soft gate of the ratio of each token, the mean over a response's tokens, A as of GRPO."""

    config: configs.SAPOConfig
    loss_mean = "sequence"

    def advantages(self, rewards: Tensor) -> Tensor:
        return formulas.group_advantages(rewards)

    def losses(self, groups: Groups) -> Tensor:
        advantages = groups.per_token(groups["advantages"])
        tau = (self.config.tau_pos, self.config.tau_neg)
        return formulas.sapo(
            groups.token_logprobs, groups["old_tokens"], advantages, tau_pos=tau[0], tau_neg=tau[1]
        )

    def sampler_log_ratios(self, groups: Groups) -> Tensor:
        """log π_old − log π_sampler of tokens, [n]."""
        return sampler_log_ratios(groups)

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        ratios = formulas.bounded_exp(groups.token_logprobs.detach() - groups["old_tokens"])
        return {"ratio_mean": self.metric_sum(groups, ratios)}


class VESPO(PolicyGradient):
    """−φ(ρ) A log π(y|x), φ a soft kernel of a response's whole ratio ρ, A as of GRPO."""

    config: configs.VESPOConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        return formulas.group_advantages(rewards)

    def weights(self, groups: Groups) -> Tensor:
        """φ, [P, K]."""
        k = (self.config.k_pos, self.config.k_neg)
        decay = (self.config.lambda_pos, self.config.lambda_neg)
        return formulas.vespo_weights(
            groups.logprobs - groups["old"], groups["advantages"], k=k, decay=decay
        )

    def losses(self, groups: Groups) -> Tensor:
        return formulas.reinforce(groups.logprobs, self.weights(groups) * groups["advantages"])

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        return {"weight_mean": self.metric_sum(groups, self.weights(groups))}


# --- Quadratic losses instead of clipping, of responses that any policy may have sampled.


class REBEL(PolicyGradient):
    """Regression to relative rewards: log-ratios of pairs become their differences of rewards; the
    mean over pairs.
    """

    config: configs.REBELConfig

    def losses(self, groups: Groups) -> Tensor:
        compared = map(pairs, (groups.logprobs, groups["old"], groups["advantages"]))
        return formulas.rebel(*compared, eta=self.config.eta)

    def sampler_log_ratios(self, groups: Groups) -> Tensor:
        """log π_old − log π_sampler of pairs, [P, M]."""
        return pairs(super().sampler_log_ratios(groups)).sum(-1)

    def sampler_metrics(self, groups: Groups, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Means over the pairs that take part."""
        counts = self.takes_part(groups)
        return with_count(
            {name: value.where(counts, 0.0).sum() for name, value in values.items()}, counts.sum()
        )

    def takes_part(self, groups: Groups) -> Tensor:
        return pairs(groups["loss_mask"]).all(-1)


class CoPG(REBEL):
    """Differences of rewards, less the KL of the policy as it is, weigh those of log-ratios to the
    reference.
    """

    def losses(self, groups: Groups) -> Tensor:
        return formulas.copg(
            *map(pairs, (groups.logprobs, groups["ref"], groups["rewards"])), beta=self.kl.value
        )


class OAPL(PolicyGradient):
    """Regression to optimal advantages: log-ratios of responses become their rewards less the
    optimal value.
    """

    config: configs.OAPLConfig

    def losses(self, groups: Groups) -> Tensor:
        inputs = groups.logprobs, groups["old"], groups["advantages"]
        return formulas.oapl(*inputs, beta1=self.config.beta1, beta2=self.config.beta2)
