"""PPO for language models: a critic, advantages of tokens, clipped ratios of tokens.

Schulman et al. 2017 with the habits of RLHF (Ziegler et al. 2019, Stiennon et al. 2020, Huang et
al. 2024): a KL penalty at each token, clipped values, whitened advantages.

Shapes: N tokens of S responses, one after the other; response s has the tokens cu_seqlens[s] to
cu_seqlens[s + 1].
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fastp3o.objectives.base import (
    LossAndMetrics,
    Microbatch,
    Minibatches,
    Objective,
    SumOverProcesses,
    masked_tokens,
    sampler_ratio_metrics,
    with_count,
)
from fastp3o.objectives.config.ppo import CriticConfig, TokenRatioConfig
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.packed_row import PackedRow
from fastp3o.rewards.scaling import AbsoluteScaler
from fastp3o_kernels import Head, sequence_logprobs
from fastp3o_kernels.losses import bounded_exp, ppo_clip, ppo_penalty, step_kl, truncated_ratios

if TYPE_CHECKING:
    # Functions import what they need of `models`: with transformers' models it takes seconds.
    from fastp3o.models.packed_model import PackedModel


# --- objectives with a critic ---------------------------------------------------------------------


class ActorCritic(Objective):
    """Advantages of tokens by a critic, which trains beside the policy. `prepare` adds, [N] fp32
    each: `old_values`, the values before each token at the rollout; `advantages`, whitened over the
    update; `returns`, targets of values.
    """

    kl: KLCoefficient

    def __init__(self, config: CriticConfig):
        self.config = config
        self.scaler = AbsoluteScaler(config.reward_clip, scale=config.reward_scaling == "absolute")
        self.kl = KLCoefficient(config.kl_coef, config.target_kl)

    @property
    def reads_old_first(self) -> bool:
        """Advantages have the KL of each token."""
        return self.kl.value != 0

    @property
    def learning_rates(self) -> Mapping[str, float]:
        return {"critic": self.config.critic_learning_rate}

    def add_to(self, policy: "PackedModel") -> None:
        """Adds the critic as a submodule of the policy: it is wrapped, trained and saved with the
        policy.
        """
        policy.critic = Critic(policy)

    @torch.no_grad()
    def prepare(
        self, policy: nn.Module, minibatches: Minibatches, sum_over_processes: SumOverProcesses
    ) -> Minibatches:
        from fastp3o.models.sharding import map_rows_in_lockstep

        minibatches = super().prepare(policy, minibatches, sum_over_processes)
        microbatches = list(chain.from_iterable(minibatches))
        values = map_rows_in_lockstep(
            [batch.row for batch in microbatches], policy.get_submodule("critic")
        )
        advantages = [self.advantages(*pair) for pair in zip(microbatches, values, strict=True)]
        whitened = whiten(advantages, sum_over_processes)
        prepared = iter(
            replace(
                batch, prepared={"old_values": old, "advantages": white, "returns": old + advantage}
            )
            for batch, old, white, advantage in zip(
                microbatches, values, whitened, advantages, strict=True
            )
        )
        return [[next(prepared) for _ in minibatch] for minibatch in minibatches]

    def advantages(self, microbatch: Microbatch, values: Tensor) -> Tensor:
        """Advantages of the tokens, [N] fp32, not whitened yet."""
        row = microbatch.row
        logprobs = (microbatch.old_token_logprobs, microbatch.ref_token_logprobs)
        rewards = token_rewards(
            microbatch.rewards.flatten(), *logprobs, row.cu_seqlens, kl_coef=self.kl.value
        )
        if (at_tokens := microbatch.token_rewards) is not None:
            # The last token has the rest of the reward, such as penalties and what its bound takes
            # away.
            rest = -sequence_logprobs(at_tokens, row.cu_seqlens)
            rewards = (rewards + at_tokens).index_add(0, row.cu_seqlens[1:].long() - 1, rest)
        longest = max(row.labeled_lengths)
        return estimate_advantages(
            rewards, values, row.cu_seqlens, longest, gae_lambda=self.config.gae_lambda
        )

    def divisor(self, row: PackedRow, loss_mask: Tensor | None) -> int:
        return masked_tokens(row, loss_mask)


class PPO(ActorCritic):
    """Token-level PPO."""

    config: TokenRatioConfig

    def loss(
        self,
        policy: nn.Module,
        microbatch: Microbatch,
        divisor: float | Tensor,
        *,
        first: bool = False,
    ) -> LossAndMetrics:
        from fastp3o.models.packed_model import label_entropies, label_logprobs

        row, critic = microbatch.row, policy.get_submodule("critic")

        def logprobs_entropy_values(
            hidden: Tensor, head: Head
        ) -> tuple[Tensor, Tensor | None, Tensor]:
            if self.config.entropy_coef:
                return *label_entropies(hidden, head, row), critic(row)
            return label_logprobs(hidden, head, row), None, critic(row)

        logprobs, entropy, values = policy(row, row.labeled_at, logprobs_entropy_values)
        if first:
            microbatch.note(logprobs)
        return ppo_loss(logprobs, values, microbatch, divisor, self.config, entropy)


# --- the critic and its advantages ----------------------------------------------------------------


class Critic(nn.Module):
    """A separate model of values, so that learning them does not move the policy. It is a copy of
    the starting policy, with the same trainable parameters, and a value head in place of the
    language head. The value head starts at zero: the first advantages are those without a critic.
    """

    def __init__(self, policy: "PackedModel"):
        super().__init__()
        self.body = copy.deepcopy(policy)
        language_head = self.body.head().weight
        self.value_head = nn.Linear(language_head.shape[1], 1, bias=False)
        nn.init.zeros_(self.value_head.weight)
        if language_head is not self.body.model.get_input_embeddings().weight:
            # The critic does not use it.
            self.body.model.get_output_embeddings().requires_grad_(False)

    def forward(self, row: PackedRow) -> Tensor:
        """The value before each labeled token, [N] fp32."""
        from fastp3o.models.packed_model import scalars

        return self.body(
            row, row.labeled_at, lambda hidden, head: scalars(hidden, self.value_head.weight)
        )


def token_rewards(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, *, kl_coef: float
) -> Tensor:
    """KL penalties of tokens, and a response's reward at its last token (Ziegler et al. 2019): [S],
    [N] x 2 -> [N].
    """
    kl_penalties = -kl_coef * (logprobs - ref_logprobs) if kl_coef else torch.zeros_like(logprobs)
    return kl_penalties.index_add(0, cu_seqlens[1:].long() - 1, rewards)


def estimate_advantages(
    rewards: Tensor, values: Tensor, cu_seqlens: Tensor, longest: int, gae_lambda: float
) -> Tensor:
    """Σ_l λ^l δ_{t+l}, δ_t = r_t + V_{t+1} − V_t, with V = 0 after the last token and no discount:
    [N] x 2 -> [N].

    longest: tokens of the longest response. Schulman et al. 2016, equation 16. Cut responses end
    like any other. Each pass doubles the number of terms: A_t of 2n terms is A_t + λ^n A_{t+n} of
    n.
    """
    lengths, positions = cu_seqlens.diff(), torch.arange(len(rewards), device=rewards.device)
    left = cu_seqlens[1:].repeat_interleave(lengths, output_size=len(rewards)) - positions

    def later(numbers: Tensor, distance: int) -> Tensor:
        """The number `distance` tokens later, 0 after the end of a response."""
        return numbers.roll(-distance).masked_fill(left <= distance, 0.0)

    advantages, terms = rewards + later(values, 1) - values, 1
    while terms < longest:
        advantages = advantages.add(later(advantages, terms), alpha=gae_lambda**terms)
        terms *= 2
    return advantages


def whiten(values: list[Tensor], sum_over_processes: SumOverProcesses) -> list[Tensor]:
    """Shifts and scales all values of all processes to mean 0 and standard deviation 1; shapes
    stay.
    """
    together = torch.cat(values).double()
    sums = torch.stack(
        [together.new_full((), len(together)), together.sum(), together.square().sum()]
    )
    count, total, squares = sum_over_processes(sums)
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0.0).sqrt()
    return [(value - mean) / (deviation + 1e-8) for value in values]


# --- losses ---------------------------------------------------------------------------------------


def ppo_loss(
    logprobs: Tensor,
    values: Tensor,
    microbatch: Microbatch,
    divisor: float | Tensor,
    config: TokenRatioConfig,
    entropy: Tensor | None = None,
) -> LossAndMetrics:
    """Bounded policy loss and clipped value loss, summed over the tokens that take part. logprobs,
    values, entropy: [N] fp32. microbatch: as `ActorCritic.prepare` leaves it. divisor: of the sums.
    """
    advantages, (total, count) = microbatch.prepared["advantages"], sum_and_count(microbatch)
    ratio = bounded_exp(logprobs - microbatch.old_token_logprobs)
    compared = logprobs, microbatch.old_token_logprobs, advantages
    if config.step_bound == "penalty":
        policy_losses = ppo_penalty(*compared, coef=config.step_kl_coef)
    else:
        policy_losses = ppo_clip(*compared, clip_low=config.clip_range)
    if config.step_bound == "both":
        policy_losses = policy_losses + config.step_kl_coef * step_kl(*compared[:2])
    sampler_metrics: dict[str, Tensor] = {}
    if config.sampler_ratio_cap:
        sampler_ratios = truncated_ratios(microbatch.sampler_log_ratios(), config.sampler_ratio_cap)
        policy_losses = policy_losses * sampler_ratios
        sampler_metrics = sampler_ratio_metrics(sampler_ratios, config.sampler_ratio_cap)
    policy_loss = total(policy_losses)

    value_terms = clipped_value_loss(values, microbatch, config.value_clip_range)
    outside = (ratio < 1 - config.clip_range) | (ratio > 1 + config.clip_range)
    sums = {
        "ratio_mean": total(ratio),
        "clip_fraction": total(outside.float()),
        "policy_loss": policy_loss,
        **{name: total(value) for name, value in (value_terms | sampler_metrics).items()},
    }
    loss = policy_loss + config.value_coef * sums["value_loss"]
    if entropy is not None:
        sums["policy_entropy"] = total(entropy)
        loss = loss - config.entropy_coef * sums["policy_entropy"]
    return loss / divisor, with_count(sums, count) | {"ratio_max": ratio.detach().max()}


def clipped_value_loss(values: Tensor, microbatch: Microbatch, reach: float) -> dict[str, Tensor]:
    """Returns for each token, [N] fp32, the loss of its value, and whether that has moved further
    than `reach`.
    """
    old_values, returns = microbatch.prepared["old_values"], microbatch.prepared["returns"]
    clipped_values = old_values + (values - old_values).clamp(-reach, reach)
    loss = torch.maximum((values - returns).square(), (clipped_values - returns).square()) / 2
    return {
        "value_loss": loss,
        "value_clip_fraction": ((values - old_values).abs() > reach).float(),
    }


def sum_and_count(microbatch: Microbatch) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The sum of the values [N] of tokens that take part in the loss, as a function, and the number
    of these, 0-d.
    """
    tokens = microbatch.old_token_logprobs
    if microbatch.loss_mask is None:
        return torch.sum, torch.full((), float(len(tokens)), device=tokens.device)
    lengths = microbatch.row.cu_seqlens.diff()
    loss_mask = microbatch.loss_mask.flatten().repeat_interleave(lengths, output_size=len(tokens))
    return lambda values: values.where(loss_mask, 0.0).sum(), loss_mask.sum()
