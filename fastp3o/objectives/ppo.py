"""PPO for language models: a critic, advantages of tokens, clipped ratios of tokens.

Schulman et al. 2017 with the habits of RLHF (Ziegler et al. 2019, Stiennon et al. 2020, Huang et al. 2024): a KL
penalty at each token, clipped values, whitened advantages. N tokens of a packed row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.config import objective_name, option
from fastp3o.models.packed_model import PackedModel, label_entropies, label_logprobs
from fastp3o.models.sharding import map_rows_in_lockstep
from fastp3o.objectives.advantages import estimate_advantages, token_rewards, whiten
from fastp3o.objectives.base import LossAndMetrics, Microbatch, Objective, SumOverProcesses
from fastp3o.objectives.critic import Critic
from fastp3o.objectives.kl_coefficient import KLCoefficient, KLConfig
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels import Head
from fastp3o_kernels.losses import ppo_clip

# Log-probabilities of scored tokens, or these and entropies, [N] fp32 each.
OfHead = Callable[[Tensor, Head, PackedRow], Tensor | tuple[Tensor, Tensor]]


@dataclass(frozen=True, kw_only=True)
class PPOConfig(KLConfig):
    """PPO (arXiv 1707.06347): token by token, with a critic; every response of a prompt counts alone."""

    CHANGEABLE: ClassVar[tuple[str, ...]] = (
        *("clip_range", "gae_lambda", "critic_learning_rate", "value_coef", "value_clip_range"),
        "entropy_coef",
        "reward_clip",
    )

    objective: str = objective_name("ppo")
    clip_range: float = option(0.2, "Epsilon of the clipping of a token's ratio (Schulman et al. 2017: 0.2).")
    kl_coef: float = option(0.05, "Beta, the weight of each token's KL penalty.")
    gae_lambda: float = option(0.95, "Lambda of generalised advantage estimation; nothing is discounted.")
    critic_learning_rate: float = option(1e-5, "Peak learning rate of the critic's AdamW (OpenRLHF: 9e-6 at 7 B).")
    entropy_coef: float = option(0.0, "Weight of an entropy bonus, the mean over tokens, in nats.")
    value_coef: float = option(0.1, "Weight of the value loss beside the policy's (TRL: 0.1).")
    value_clip_range: float = option(0.2, "Values move at most this far from the rollout's before their loss is cut.")
    reward_scaling: str = field(
        default="absolute",
        metadata={
            "help": "absolute: divide rewards by their running standard deviation (first author's code); none.",
            "choices": ["absolute", "none"],
        },
    )
    reward_clip: float = option(10.0, "Bound on scaled rewards (first author: 10); 0 for none.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.clip_range > 0, "clip_range", "above 0")
        self.check(0 <= self.gae_lambda <= 1, "gae_lambda", "within 0 and 1")
        self.check(self.critic_learning_rate > 0, "critic_learning_rate", "above 0")
        self.check(self.entropy_coef >= 0, "entropy_coef", "0 or more")
        self.check(self.value_coef >= 0, "value_coef", "0 or more")
        self.check(self.value_clip_range > 0, "value_clip_range", "above 0")
        self.check(self.reward_clip >= 0, "reward_clip", "0 or more")

    def build(self) -> "PPO":
        return PPO(self)


@dataclass(frozen=True)
class PPOMicrobatch(Microbatch):
    """A packed row with what the critic made of it."""

    old_values: Tensor  # [N] fp32, before each token, at the time of the rollout
    advantages: Tensor  # [N] fp32, whitened over the update
    returns: Tensor  # [N] fp32, the targets of the values


class PPO(Objective):
    """Token-level PPO."""

    averages_tokens = True

    def __init__(self, config: PPOConfig):
        self.config = config
        self.scaler = AbsoluteScaler(config.reward_clip, scale=config.reward_scaling == "absolute")
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    @property
    def learning_rates(self) -> Mapping[str, float]:
        return {"critic": self.config.critic_learning_rate}

    @property
    def parts(self) -> dict[str, Stateful]:
        return super().parts | self.kl.parts

    @property
    def adapted(self) -> dict[str, float]:
        return self.kl.adapted

    def add_to(self, policy: PackedModel) -> None:
        """The critic, as a submodule of the policy: what wraps, trains and saves one does so with the other."""
        policy.critic = Critic(policy)

    @torch.no_grad()
    def prepare(
        self, policy: nn.Module, minibatches: list[list[Microbatch]], sum_over_processes: SumOverProcesses
    ) -> list[list[Microbatch]]:
        """Adds values, advantages and returns to every microbatch."""
        self.kl.adapt(minibatches, sum_over_processes)
        microbatches = [microbatch for minibatch in minibatches for microbatch in minibatch]
        values = map_rows_in_lockstep([microbatch.row for microbatch in microbatches], policy.get_submodule("critic"))
        advantages = [self.advantages(*pair) for pair in zip(microbatches, values, strict=True)]
        whitened = whiten(advantages, sum_over_processes)
        prepared = iter(
            PPOMicrobatch(
                **vars(microbatch),
                old_values=old_values,
                advantages=white,
                returns=old_values + advantage,
            )
            for microbatch, old_values, white, advantage in zip(microbatches, values, whitened, advantages, strict=True)
        )
        return [[next(prepared) for _ in minibatch] for minibatch in minibatches]

    def advantages(self, microbatch: Microbatch, values: Tensor) -> Tensor:
        """[N] fp32, not whitened yet."""
        rewards = token_rewards(
            microbatch.rewards.flatten(),
            microbatch.old_token_logprobs,
            microbatch.ref_token_logprobs,
            microbatch.row.cu_seqlens,
            kl_coef=self.kl.value,
        )
        return estimate_advantages(rewards, values, microbatch.row.scored_lengths, gae_lambda=self.config.gae_lambda)

    def loss(self, policy: nn.Module, microbatch: Microbatch, *, on_policy: bool = False) -> LossAndMetrics:
        of_head: OfHead = label_entropies if self.config.entropy_coef else label_logprobs
        found, values = with_values(policy, microbatch.row, of_head)
        return ppo_loss(found, values, cast(PPOMicrobatch, microbatch), self.config)


def with_values(policy: nn.Module, row: PackedRow, of_head: OfHead) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor]:
    """What `of_head` makes of hidden states and head, and the value before each scored token, [N] fp32."""
    critic = policy.get_submodule("critic")
    return policy(row, row.scored_at, lambda hidden, head: (of_head(hidden, head, row), critic(row)))


def ppo_loss(
    found: Tensor | tuple[Tensor, Tensor], values: Tensor, microbatch: PPOMicrobatch, config: PPOConfig
) -> LossAndMetrics:
    """Clipped policy loss and clipped value loss, means over tokens that count.

    found: log-probs, or these and entropies, [N] fp32, as the values.
    """
    logprobs, entropy = found if isinstance(found, tuple) else (found, None)
    advantages, old_values, returns = microbatch.advantages, microbatch.old_values, microbatch.returns
    mean = partial(mean_where, takes_part=tokens_taking_part(microbatch))
    ratio = (logprobs - microbatch.old_token_logprobs).exp()
    policy_losses = ppo_clip(logprobs, microbatch.old_token_logprobs, advantages, clip_low=config.clip_range)
    policy_loss = mean(policy_losses)

    reach = config.value_clip_range
    clipped_values = old_values + (values - old_values).clamp(-reach, reach)
    value_loss = mean(torch.maximum((values - returns).square(), (clipped_values - returns).square()) / 2)

    outside = (ratio < 1 - config.clip_range) | (ratio > 1 + config.clip_range)
    metrics = {
        "ratio_mean": mean(ratio),
        "ratio_max": ratio.max(),
        "clip_fraction": mean(outside.float()),
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "value_clip_fraction": mean(((values - old_values).abs() > reach).float()),
    }
    loss = policy_loss + config.value_coef * value_loss
    if entropy is not None:
        metrics["policy_entropy"] = mean(entropy)
        loss = loss - config.entropy_coef * metrics["policy_entropy"]
    return loss, {name: value.detach() for name, value in metrics.items()}


def tokens_taking_part(microbatch: Microbatch) -> Tensor | None:
    """[N] bool: which tokens take part in the loss; None for all."""
    if microbatch.counted is None:
        return None
    lengths = microbatch.row.cu_seqlens.diff()
    return microbatch.counted.flatten().repeat_interleave(lengths, output_size=len(microbatch.row.labels))


def mean_where(values: Tensor, takes_part: Tensor | None) -> Tensor:
    """0 where nothing takes part."""
    if takes_part is None:
        return values.mean()
    return values.where(takes_part, 0.0).sum() / takes_part.sum().clamp(min=1)
