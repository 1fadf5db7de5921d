"""Pairwise Proximal Policy Optimization (arXiv 2310.00212): the clipped loss on differences of rewards."""

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from fastp3o.config import option
from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.base import Microbatch, SumOverProcesses
from fastp3o.objectives.config import OnlineConfig
from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler
from fastp3o_kernels import Head, P3OLossOutput, P3OSettings, linear_p3o_loss

# Metrics that are means over prompts, their responses or their pairs, also where the loss is one over tokens.
OF_PROMPTS = ("ratio_mean", "advantage_mean_abs", "zero_gradient_fraction", "kl")


@dataclass(frozen=True, kw_only=True)
class P3OConfig(OnlineConfig, P3OSettings):
    """Stage 3: Pairwise Proximal Policy Optimization. Defaults are the first author's settings for a 1 B model."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = ("clip_range", "kl_coef", "reward_clip")

    reward_scaling: str = field(
        default="difference",
        metadata={
            "help": "Divide rewards by the running standard deviation of the reward differences of a pair; absolute: "
            "of the rewards themselves (first author's code; breaks the invariance to shifts per prompt); none.",
            "choices": ["difference", "absolute", "none"],
        },
    )
    reward_clip: float = option(
        10.0,
        "Bound on scaled reward differences, or on scaled rewards with reward_scaling=absolute (first author: 10); "
        "0 for none.",
    )

    def __post_init__(self) -> None:
        OnlineConfig.__post_init__(self)
        P3OSettings.__post_init__(self)
        self.check(self.reward_clip >= 0, "reward_clip", "0 or more")

    def objective(self) -> "P3O":
        return P3O(self)


class P3O:
    """An Objective: no critic, and no change where all rewards of a prompt are shifted alike."""

    def __init__(self, config: P3OConfig):
        self.config = config
        self.averages_tokens = config.clipping == "token"
        self.clip_range = config.clip_range
        self.learning_rates: dict[str, float] = {}
        scaler = AbsoluteScaler if config.reward_scaling == "absolute" else DifferenceScaler
        self.scaler = scaler(config.reward_clip, scale=config.reward_scaling != "none")

    def add_to(self, policy: PackedModel) -> None:
        """There is no critic."""

    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """Rewards and log-probs are all that the loss takes."""
        return minibatches

    def loss(self, policy: nn.Module, microbatch: Microbatch) -> P3OLossOutput:
        row = microbatch.row

        def p3o_loss(hidden: Tensor, head: Head) -> P3OLossOutput:
            return linear_p3o_loss(
                hidden,
                head,
                row.labels,
                row.cu_seqlens_on_host,
                microbatch.old_logprobs,
                microbatch.ref_logprobs,
                microbatch.rewards,
                self.config,
                old_token_logprobs=microbatch.old_token_logprobs if self.averages_tokens else None,
            )

        output = policy(row, row.scored_at, p3o_loss)
        if not self.averages_tokens:
            return output
        # A minibatch averages metrics with the weights of the loss, which count tokens here.
        share = microbatch.prompt_share / microbatch.weight
        return P3OLossOutput(output.loss, output.metrics | {name: share * output.metrics[name] for name in OF_PROMPTS})
