"""Group relative policy optimization (arXiv 2402.03300) and what followed it.

All clip the ratios of tokens as PPO does, with the advantage of a response, which its own group gives, at each of its
tokens. They differ in what is divided by what, and in what else goes into the loss; every setting is an option of each.
"""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from fastp3o.config import objective_name, option
from fastp3o.objectives.policy_gradient import KL_ESTIMATOR, PolicyGradient, PolicyGradientConfig
from fastp3o_kernels.head.groups import Groups
from fastp3o_kernels.losses import group_advantages, ppo_clip

LOSS_MEAN = {
    "help": "sequence: the mean over a response's tokens, then over responses (GRPO); token: the mean over all tokens "
    "of a minibatch (DAPO); constant: the sum over a response's tokens by max_response_tokens (Dr. GRPO).",
    "choices": ["sequence", "token", "constant"],
}


@dataclass(frozen=True, kw_only=True)
class ClippedConfig(PolicyGradientConfig):
    """Clipped ratios, and advantages within a prompt's responses."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("clip_low", "clip_high")

    clip_low: float = option(0.2, "Ratios count down to 1 − clip_low.")
    clip_high: float = option(0.2, "Ratios count up to 1 + clip_high.")
    scale_advantages: bool = option(True, "Divide advantages by the standard deviation of their prompt's rewards.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(0 < self.clip_low < 1, "clip_low", "above 0 and below 1")
        self.check(self.clip_high > 0, "clip_high", "above 0")


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(ClippedConfig):
    """GRPO (arXiv 2402.03300): the mean over a response's tokens, then over responses; a KL in the loss."""

    objective: str = objective_name("grpo")
    kl_coef: float = option(0.04, "Beta, the weight of the KL to the reference (arXiv 2402.03300: 0.04).")
    kl_estimator: str = field(default="k3", metadata=KL_ESTIMATOR)
    loss_mean: str = field(default="sequence", metadata=LOSS_MEAN)

    def build(self) -> "GRPO":
        return GRPO(self, loss_mean=self.loss_mean)


@dataclass(frozen=True, kw_only=True)
class DrGRPOConfig(GRPOConfig):
    """Dr. GRPO (arXiv 2503.20783): lengths and deviations divide nothing; no KL."""

    objective: str = objective_name("dr_grpo")
    kl_coef: float = option(0.0, "Beta, the weight of the KL to the reference (arXiv 2503.20783: none).")
    loss_mean: str = field(default="constant", metadata=LOSS_MEAN)
    scale_advantages: bool = option(False, "Divide advantages by the standard deviation of their prompt's rewards.")


@dataclass(frozen=True, kw_only=True)
class DAPOConfig(GRPOConfig):
    """DAPO (arXiv 2503.14476): clipped higher above, the mean over all tokens, ties sampled again; no KL."""

    objective: str = objective_name("dapo")
    clip_high: float = option(0.28, "Ratios count up to 1 + clip_high.")
    kl_coef: float = option(0.0, "Beta, the weight of the KL to the reference (arXiv 2503.14476: none).")
    loss_mean: str = field(default="token", metadata=LOSS_MEAN)
    dynamic_sampling: int = option(
        3, "Sample the responses of a prompt again while all their rewards are equal, at most so often; 0 never."
    )


@dataclass(frozen=True, kw_only=True)
class GRPOPlusConfig(DAPOConfig):
    """GRPO+ (DeepCoder, 2025): DAPO's loss without responses that were cut off; no KL, no entropy bonus."""

    objective: str = objective_name("grpo_plus")
    mask_truncated: bool = option(
        True, "Responses without an end-of-sequence take no part in the loss; they stay in others' baselines."
    )


class GRPO(PolicyGradient):
    """Clipped ratios of tokens."""

    config: ClippedConfig

    def advantages(self, rewards: Tensor) -> Tensor:
        return group_advantages(rewards, scale=self.config.scale_advantages)

    def losses(self, groups: Groups) -> Tensor:
        advantages = groups.of_tokens(groups["advantages"])
        return self.clipped(groups.token_logprobs, groups["old_tokens"], advantages)

    def clipped(self, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor) -> Tensor:
        clip = {"clip_low": self.config.clip_low, "clip_high": self.config.clip_high}
        return ppo_clip(logprobs, old_logprobs, advantages, **clip)

    def metrics(self, groups: Groups) -> dict[str, Tensor]:
        return self.ratio_metrics(groups, groups.token_logprobs - groups["old_tokens"])

    def ratio_metrics(self, groups: Groups, log_ratios: Tensor) -> dict[str, Tensor]:
        ratios = log_ratios.detach().exp()
        outside = (ratios < 1 - self.config.clip_low) | (ratios > 1 + self.config.clip_high)
        values = {"ratio_mean": ratios, "clip_fraction": outside.to(ratios.dtype)}
        return {name: self.sum_for_mean(groups, value) for name, value in values.items()}
