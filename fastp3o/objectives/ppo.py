"""PPO for language models: a critic, advantages of tokens, clipped ratios of tokens.

Schulman et al. 2017 with the habits of RLHF (Ziegler et al. 2019, Stiennon et al. 2020, Huang et al. 2024): a KL
penalty at each token, clipped values, whitened advantages. N tokens of a packed row.
"""

from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel, label_logprobs, unwrap
from fastp3o.objectives.advantages import advantages, token_rewards, whiten
from fastp3o.objectives.config import PPOConfig
from fastp3o.objectives.critic import Critic
from fastp3o.packing.pack import PackedRow
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o.training.minibatches import Pairs
from fastp3o_kernels import Head


@dataclass
class WithAdvantages(Pairs):
    """A packed row with what the critic made of it."""

    old_values: Tensor  # [N] fp32, before each token, at the time of the rollout
    advantages: Tensor  # [N] fp32, whitened over the round
    returns: Tensor  # [N] fp32, what values are drawn to


class PPO:
    """Token-level PPO; an Algorithm."""

    averages_tokens = True
    clip_range = None

    def __init__(self, config: PPOConfig):
        self.config = config
        self.learning_rates = {"critic": config.critic_learning_rate}
        self.scaler = AbsoluteScaler(config.reward_clip, scale=config.reward_scaling == "absolute")

    def add_to(self, policy: PackedModel) -> None:
        """The critic, as a submodule of the policy: what wraps, trains and saves one does so with the other."""
        policy.critic = Critic(policy)

    @torch.no_grad()
    def prepare(
        self, accelerator: Accelerator, policy: nn.Module, minibatches: list[list[Pairs]]
    ) -> list[list[WithAdvantages]]:
        """Adds values, advantages and returns of all rows."""
        every_row = [pairs for minibatch in minibatches for pairs in minibatch]
        with accelerator.autocast():
            values = [unwrap(policy).critic(pairs.row) for pairs in every_row]
        estimated = [
            advantages(
                token_rewards(
                    pairs.rewards.flatten(),
                    pairs.old_token_logprobs,
                    pairs.ref_token_logprobs,
                    pairs.row.cu_seqlens,
                    kl_coef=self.config.kl_coef,
                ),
                of_row,
                pairs.row.scored_lengths,
                gae_lambda=self.config.gae_lambda,
            )
            for pairs, of_row in zip(every_row, values, strict=True)
        ]
        found = zip(values, whiten(accelerator, estimated), estimated, strict=True)
        with_advantages = iter(
            WithAdvantages(**vars(pairs), old_values=of_row, advantages=whitened, returns=of_row + advantage)
            for pairs, (of_row, whitened, advantage) in zip(every_row, found, strict=True)
        )
        return [[next(with_advantages) for _ in minibatch] for minibatch in minibatches]

    def loss(self, policy: nn.Module, pairs: WithAdvantages) -> tuple[Tensor, dict[str, Tensor]]:
        return ppo_loss(*logprobs_and_values(policy, pairs.row), pairs, self.config)


def logprobs_and_values(policy: nn.Module, row: PackedRow) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the scored tokens and the value of what stands before each, [N] fp32 both."""
    critic = unwrap(policy).critic

    def both(hidden: Tensor, head: Head) -> tuple[Tensor, Tensor]:
        return label_logprobs(hidden, head, row), critic(row)

    return policy(row, row.scored_at, both)


def ppo_loss(
    logprobs: Tensor, values: Tensor, given: WithAdvantages, config: PPOConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped policy loss and clipped value loss, means over tokens; log-probs and values [N] fp32."""
    ratio = (logprobs - given.old_token_logprobs).exp()
    clipped_ratio = ratio.clamp(1 - config.clip_range, 1 + config.clip_range)
    of_policy = torch.maximum(-given.advantages * ratio, -given.advantages * clipped_ratio)

    reach = config.value_clip_range
    clipped_values = given.old_values + (values - given.old_values).clamp(-reach, reach)
    of_values = torch.maximum((values - given.returns).square(), (clipped_values - given.returns).square()) / 2

    metrics = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "clip_fraction": (ratio != clipped_ratio).float().mean(),
        "policy_loss": of_policy.mean(),
        "value_loss": of_values.mean(),
        "value_clip_fraction": (values != clipped_values).float().mean(),
    }
    loss = of_policy.mean() + config.value_coef * of_values.mean()
    return loss, {name: value.detach() for name, value in metrics.items()}
