"""Pairwise Proximal Policy Optimization (P3O) and its unclipped gradient (PPG), arXiv 2310.00212."""

from dataclasses import fields, replace
from typing import Literal

import torch
from torch import Tensor, nn

from fastp3o.config import objective_name, option, options
from fastp3o.errors import UserError
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, masked_tokens
from fastp3o.objectives.config import KLConfig, RewardScalingConfig
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.packed_row import PackedRow
from fastp3o_kernels import Head, P3OLossOutput, P3OSettings, linear_p3o_loss, sequence_logprobs
from fastp3o_kernels.p3o.settings import DEFAULTS, Clipping, KLReward

HELP = {setting.name: setting.metadata["help"] for setting in fields(P3OSettings)}


@options
class P3OConfig(RewardScalingConfig, KLConfig):
    """P3O (arXiv 2310.00212): clipped differences of rewards. Defaults are the first author's for a 1 B model."""

    clipping: Clipping = option(DEFAULTS.clipping, HELP["clipping"])
    clip_range: float = option(DEFAULTS.clip_range, HELP["clip_range"], above=0, changeable=True)
    ratio_cap: float = option(DEFAULTS.ratio_cap, HELP["ratio_cap"], at_least=1)
    kl_coef: float = option(DEFAULTS.kl_coef, HELP["kl_coef"], at_least=0, changeable=True)
    kl_reward: KLReward = option(DEFAULTS.kl_reward, HELP["kl_reward"])
    objective: str = objective_name("p3o")

    def build(self) -> "P3O":
        return P3O(self)


class P3O(Objective):
    """Needs no critic. Adding a constant to all rewards of a prompt changes nothing."""

    kl: KLCoefficient

    def __init__(self, config: P3OConfig):
        chosen = {name: getattr(config, name) for name in HELP}
        chosen["sampler_ratio_cap"] = config.sampler_ratio_cap or DEFAULTS.sampler_ratio_cap
        self.settings = P3OSettings(**chosen)
        self.weighs_pairs = bool(config.sampler_ratio_cap)
        self.old_is_policy = config.old_logprobs == "policy"
        self.scaler = config.scaler()
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    def clip_range(self, length: float) -> float | None:
        return self.settings.clip_range if self.settings.clipping in ("joint", "separate") else None

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return masked_tokens(row, loss_mask) if self.settings.clipping == "token" else len(row.groups)

    def loss(self, policy: nn.Module, microbatch: Microbatch, divisor: float | Tensor) -> LossAndMetrics:
        return self.pair_loss(policy, microbatch, divisor, on_policy=False)

    def first_loss(self, policy: nn.Module, microbatch: Microbatch, divisor: float | Tensor) -> LossAndMetrics:
        """Old log-probs are the policy's own, so that every ratio is exactly 1; not with `--old_logprobs sampler`."""
        return self.pair_loss(policy, microbatch, divisor, on_policy=self.old_is_policy)

    def pair_loss(
        self, policy: nn.Module, microbatch: Microbatch, divisor: float | Tensor, *, on_policy: bool
    ) -> LossAndMetrics:
        """on_policy: old log-probs are the policy's."""
        clips_tokens = self.settings.clipping == "token" and not on_policy
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
                None if on_policy else microbatch.old_logprobs,
                microbatch.ref_logprobs,
                microbatch.rewards,
                replace(self.settings, kl_coef=self.kl.value),
                old_token_logprobs=microbatch.old_token_logprobs if clips_tokens else None,
                valid_responses=microbatch.loss_mask,
                sampler_logprobs=sampler_logprobs,
                divisor=divisor,
            )

        loss, means, counts = policy(row, row.labelled_at, head_loss)
        count = torch.stack([*counts.values()])
        sums = torch.stack([means[name] for name in counts]) * count
        metrics = dict(zip(counts, torch.stack([sums, count], dim=1), strict=True))
        return loss, metrics | {"ratio_max": means["ratio_max"]}


@options
class PPGConfig(P3OConfig):
    """PPG (arXiv 2310.00212, equation 6): P3O's gradient before clipping; one step a round."""

    objective: str = objective_name("ppg")
    clipping: Literal["none"] = option("none", "The gradient has nothing to clip.")
    prompts_per_minibatch: int = 0
    inner_epochs: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed = {
            "old_logprobs": "policy",
            "clip_range": DEFAULTS.clip_range,
            "ratio_cap": DEFAULTS.ratio_cap,
            "kl_reward": DEFAULTS.kl_reward,
            "inner_epochs": 1,
            "prompts_per_minibatch": self.prompts_per_update,
        }
        if wrong := {name: value for name, value in fixed.items() if getattr(self, name) != value}:
            problems = (f"--{name} must be {value}, got {getattr(self, name)}" for name, value in wrong.items())
            raise UserError(f"{'; '.join(problems)}: the gradient is on-policy, so a round has one step (p3o has more)")
