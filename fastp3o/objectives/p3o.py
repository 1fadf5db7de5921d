"""Pairwise Proximal Policy Optimization (arXiv 2310.00212): the clipped loss on differences of rewards."""

from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.config import objective_name
from fastp3o.objectives.base import Microbatch, Objective, SumOverProcesses
from fastp3o.objectives.kl_coefficient import KLCoefficient, KLConfig
from fastp3o.objectives.reward_scaling import RewardScalingConfig, scaler_of
from fastp3o_kernels import Head, P3OLossOutput, P3OSettings, linear_p3o_loss

# Metrics that are means over responses, pairs or prompts of them, also where the loss is one over tokens.
OF_PROMPTS = ("ratio_mean", "advantage_mean_abs", "zero_gradient_fraction", "kl")


@dataclass(frozen=True, kw_only=True)
class P3OConfig(P3OSettings, RewardScalingConfig, KLConfig):
    """P3O (arXiv 2310.00212): clipped differences of rewards. Defaults are the first author's for a 1 B model."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("clip_range",)

    objective: str = objective_name("p3o")

    def __post_init__(self) -> None:
        RewardScalingConfig.__post_init__(self)
        P3OSettings.__post_init__(self)

    def build(self) -> "P3O":
        return P3O(self)


class P3O(Objective):
    """No critic, and no change where all rewards of a prompt are shifted alike."""

    def __init__(self, config: P3OConfig):
        self.config = config
        self.averages_tokens = config.clipping == "token"
        self.scaler = scaler_of(config)
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    @property
    def parts(self) -> dict[str, Stateful]:
        return super().parts | self.kl.parts

    @property
    def adapted(self) -> dict[str, float]:
        return self.kl.adapted

    def clip_range(self, length: float) -> float | None:
        return self.config.clip_range if self.config.clipping in ("joint", "separate") else None

    def units(self, counted: Tensor) -> Tensor:
        """Responses that have another one to be compared with."""
        return (counted & (counted.sum(1, keepdim=True) > 1)).sum()

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """Rewards and log-probs are all that the loss takes."""
        self.kl.adapt(minibatches, sum_over_processes)
        return minibatches

    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = False) -> P3OLossOutput:
        row = microbatch.row
        settings = {setting.name: getattr(self.config, setting.name) for setting in fields(P3OSettings)}

        def p3o_loss(hidden: Tensor, head: Head) -> P3OLossOutput:
            return linear_p3o_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                microbatch.old_logprobs,
                microbatch.ref_logprobs,
                microbatch.rewards,
                P3OSettings(**(settings | {"kl_coef": self.kl.value})),
                old_token_logprobs=microbatch.old_token_logprobs if self.averages_tokens else None,
                valid_responses=microbatch.counted,
                divisor=max(1, microbatch.counted_tokens()) if self.averages_tokens else None,
                on_policy=on_policy,
            )

        loss, metrics = policy(row, row.scored_at, p3o_loss)
        if self.averages_tokens:
            # A minibatch weighs metrics as its loss, by tokens; a row none of which count has zeros in any case.
            share = microbatch.response_share / (microbatch.metrics_weight or 1.0)
            metrics = metrics | {name: share * metrics[name] for name in OF_PROMPTS}
        return P3OLossOutput(loss, metrics)
