"""Pairwise Proximal Policy Optimization (P3O) and its unclipped gradient (PPG), arXiv 2310.00212."""

from dataclasses import fields, replace

from torch import Tensor, nn

from fastp3o.config import objective_name, option, options
from fastp3o.errors import UserError
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective
from fastp3o.objectives.config import KLConfig, RewardScalingConfig
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o_kernels import Head, P3OLossOutput, P3OSettings, linear_p3o_loss, sequence_logprobs
from fastp3o_kernels.p3o.output import SAMPLER_METRICS
from fastp3o_kernels.p3o.settings import CLIPPING, DEFAULTS, KL_REWARD

# These metrics are means over responses, pairs or prompts even if the loss is a mean over tokens.
PROMPT_METRICS = ("ratio_mean", "advantage_mean_abs", "zero_gradient_fraction", "kl", *SAMPLER_METRICS)

HELP = {setting.name: setting.metadata["help"] for setting in fields(P3OSettings)}


@options
class P3OConfig(RewardScalingConfig, KLConfig):
    """P3O (arXiv 2310.00212): clipped differences of rewards. Defaults are the first author's for a 1 B model."""

    clipping: str = option(DEFAULTS.clipping, HELP["clipping"], choices=CLIPPING)
    clip_range: float = option(DEFAULTS.clip_range, HELP["clip_range"], above=0, changeable=True)
    ratio_cap: float = option(DEFAULTS.ratio_cap, HELP["ratio_cap"], at_least=1)
    kl_coef: float = option(DEFAULTS.kl_coef, HELP["kl_coef"], at_least=0, changeable=True)
    kl_reward: str = option(DEFAULTS.kl_reward, HELP["kl_reward"], choices=KL_REWARD)
    objective: str = objective_name("p3o")

    def build(self) -> "P3O":
        return P3O(self)


class P3O(Objective):
    """Needs no critic. Adding a constant to all rewards of a prompt changes nothing."""

    kl: KLCoefficient

    def __init__(self, config: P3OConfig):
        self.settings = P3OSettings(
            clipping=config.clipping,
            clip_range=config.clip_range,
            ratio_cap=config.ratio_cap,
            kl_coef=config.kl_coef,
            kl_reward=config.kl_reward,
            sampler_ratio_cap=config.sampler_ratio_cap or DEFAULTS.sampler_ratio_cap,
        )
        self.weighs_pairs = bool(config.sampler_ratio_cap)
        self.averages_tokens = config.clipping == "token"
        self.old_is_policy = config.old_logprobs == "policy"
        self.scaler = config.scaler()
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    def clip_range(self, length: float) -> float | None:
        return self.settings.clip_range if self.settings.clipping in ("joint", "separate") else None

    def metric_count(self, counted: Tensor) -> Tensor:
        """Number of responses that have another one to be compared with."""
        return (counted & (counted.sum(1, keepdim=True) > 1)).sum()

    def loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        return self.pair_loss(policy, microbatch, microbatch.old_logprobs, microbatch.old_token_logprobs)

    def first_loss(self, policy: nn.Module, microbatch: Microbatch) -> LossAndMetrics:
        """Old log-probs are the policy's own, so that every ratio is exactly 1; with `--old_logprobs sampler` they are
        not.
        """
        if not self.old_is_policy:
            return self.loss(policy, microbatch)
        return self.pair_loss(policy, microbatch, None, None)

    def pair_loss(
        self, policy: nn.Module, microbatch: Microbatch, old_logprobs: Tensor | None, old_token_logprobs: Tensor | None
    ) -> LossAndMetrics:
        row, sampler_logprobs = microbatch.row, None
        if self.weighs_pairs:
            log_ratios = sequence_logprobs(microbatch.sampler_log_ratios(), row.cu_seqlens)
            sampler_logprobs = microbatch.old_logprobs - log_ratios.view(microbatch.rewards.shape)

        def head_loss(hidden: Tensor, head: Head) -> P3OLossOutput:
            return linear_p3o_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                old_logprobs,
                microbatch.ref_logprobs,
                microbatch.rewards,
                replace(self.settings, kl_coef=self.kl.value),
                old_token_logprobs=old_token_logprobs if self.averages_tokens else None,
                valid_responses=microbatch.counted,
                sampler_logprobs=sampler_logprobs,
                divisor=max(1, microbatch.counted_tokens()) if self.averages_tokens else None,
            )

        loss, metrics, _ = policy(row, row.labelled_at, head_loss)
        if self.averages_tokens:
            # The minibatch weighs all metrics by tokens. Every metric of a row without counted tokens is 0.
            share = microbatch.response_share / (microbatch.metrics_weight or 1.0)
            metrics = metrics | {name: share * metrics[name] for name in PROMPT_METRICS if name in metrics}
        return loss, metrics


@options
class PPGConfig(P3OConfig):
    """PPG (arXiv 2310.00212, equation 6): P3O's gradient before clipping; one step a round."""

    objective: str = objective_name("ppg")
    clipping: str = option("none", "The gradient has nothing to clip.", choices=("none",))
    prompts_per_minibatch: int = option(
        0, "Prompts of a round's only optimizer step; 0: all of the round's.", at_least=0
    )
    inner_epochs: int = option(
        1, "A round's only pass: after a step the policy is no longer the one that sampled.", at_least=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            f"--{name} must be left as it is, as all ratios are 1, got {value!r}"
            for name, value, default in (
                ("old_logprobs", self.old_logprobs, "policy"),
                ("clip_range", self.clip_range, DEFAULTS.clip_range),
                ("ratio_cap", self.ratio_cap, DEFAULTS.ratio_cap),
                ("kl_reward", self.kl_reward, DEFAULTS.kl_reward),
            )
            if value != default
        ]
        if self.inner_epochs != 1:
            problems.append(
                f"--inner_epochs must be 1, since the gradient is on-policy (p3o has more), got {self.inner_epochs}"
            )
        if self.minibatches_per_update != 1:
            problems.append(
                f"--prompts_per_minibatch ({self.prompts_per_minibatch}) must be --prompts_per_update "
                f"({self.prompts_per_update}): the gradient is on-policy, and a round has one step (p3o has more)"
            )
        if problems:
            raise UserError("; ".join(problems))

    def build(self) -> "PPG":
        return PPG(self)


class PPG(P3O):
    """P3O's loss with all ratios at 1: an update has only its first step."""
