"""Pairwise Proximal Policy Optimization (P3O) and its unclipped gradient (PPG), arXiv 2310.00212."""

from dataclasses import fields, replace

import torch
from torch import Tensor, nn

from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, masked_tokens
from fastp3o.objectives.config.p3o import PairRatioConfig
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import scaler_of_differences
from fastp3o_kernels import Head, P3OLossOutput, P3OSettings, linear_p3o_loss
from fastp3o_kernels.p3o.settings import DEFAULTS


class P3O(Objective):
    """Needs no critic. Adding a constant to all rewards of a prompt changes nothing."""

    kl: KLCoefficient

    def __init__(self, config: PairRatioConfig):
        chosen = {setting.name: getattr(config, setting.name) for setting in fields(P3OSettings)}
        chosen["sampler_ratio_cap"] = config.sampler_ratio_cap or DEFAULTS.sampler_ratio_cap
        self.settings = P3OSettings(**chosen)
        self.weighs_pairs = bool(config.sampler_ratio_cap)
        self.old_is_policy = config.old_logprobs == "policy"
        self.takes_pairs = config.pair_weights == "comparisons"
        self.scaler = scaler_of_differences(config.reward_scaling, config.reward_clip)
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    def clip_range(self, length: float) -> float | None:
        return self.settings.clip_range if self.settings.clipping in ("joint", "separate") else None

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return (
            masked_tokens(row, loss_mask) if self.settings.clipping == "token" else len(row.groups)
        )

    def loss(
        self,
        policy: nn.Module,
        microbatch: Microbatch,
        divisor: float | Tensor,
        *,
        first: bool = False,
    ) -> LossAndMetrics:
        # At the first step old log-probs are the policy's, unless they are the sampler's: every
        # ratio is exactly 1.
        on_policy = first and self.old_is_policy
        clips_tokens = self.settings.clipping == "token" and not on_policy
        row, sampler_logprobs = microbatch.row, None
        if self.weighs_pairs:
            sampler_logprobs = microbatch.sampler_logprobs()

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
                logprobs_out=microbatch.noted_token_logprobs if first else None,
            )

        loss, means, counts = policy(row, row.labeled_at, head_loss)
        count = torch.stack([*counts.values()])
        sums = torch.stack([means[name] for name in counts]) * count
        metrics = dict(zip(counts, torch.stack([sums, count], dim=1), strict=True))
        return loss, metrics | {"ratio_max": means["ratio_max"]}
