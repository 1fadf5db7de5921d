"""The losses that are compared, as functions of a batch's log-probs, without penalties on the KL to a reference.

P groups of K responses with at most L tokens. Losses are sums over groups, so that the gradient of each is its own.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from fastp3o.rewards.scaling import pairs
from fastp3o_kernels import P3OSettings, losses, p3o_loss

RATIO_CAP = 10.0


@dataclass(frozen=True)
class Batch:
    """token_logprobs, old: [P, K, L], 0 after a response's end. counted: [P, K, L] bool. rewards: [P, K]. values:
    [P, K, L], of the sampler before each token. expected: the policy's expected reward.
    """

    token_logprobs: Tensor
    old: Tensor
    counted: Tensor
    rewards: Tensor
    values: Tensor
    expected: float

    @property
    def logprobs(self) -> Tensor:
        return self.token_logprobs.sum(-1)

    @property
    def old_logprobs(self) -> Tensor:
        return self.old.sum(-1)

    @property
    def lengths(self) -> Tensor:
        return self.counted.sum(-1)

    def sums(self, token_losses: Tensor) -> Tensor:
        """[P, K, L] -> [P, K]."""
        return token_losses.where(self.counted, 0.0).sum(-1)


Loss = Callable[[Batch], Tensor]


def p3o(batch: Batch, clipping: str) -> Tensor:
    settings = P3OSettings(clipping=clipping, kl_coef=0.0, ratio_cap=RATIO_CAP)
    old = batch.old_logprobs
    return p3o_loss(batch.logprobs, old, old, batch.rewards, settings, divisor=1, impl="eager").loss


def rloo(batch: Batch, *, weighted: bool) -> Tensor:
    """weighted: by the ratio of the whole response, capped as P3O's."""
    advantages = losses.rloo_advantages(batch.rewards)
    if weighted:
        advantages = advantages * losses.truncated_ratios(batch.logprobs - batch.old_logprobs, RATIO_CAP)
    return losses.reinforce(batch.logprobs, advantages).mean(1).sum()


def exact_baseline(batch: Batch) -> Tensor:
    """RLOO with whole ratios, and the policy's own expected reward as the baseline, which nobody knows."""
    ratios = losses.truncated_ratios(batch.logprobs - batch.old_logprobs, RATIO_CAP)
    return losses.reinforce(batch.logprobs, (batch.rewards - batch.expected) * ratios).mean(1).sum()


def clipped(batch: Batch, advantages: Tensor, *, clip_high: float = 0.2, mean: str) -> Tensor:
    """PPO's clipped ratios of tokens. advantages: [P, K] or [P, K, L]. mean: over a response's tokens, or their sum."""
    advantages = advantages if advantages.dim() == 3 else advantages[..., None].expand_as(batch.old)
    sums = batch.sums(losses.ppo_clip(batch.token_logprobs, batch.old, advantages, clip_low=0.2, clip_high=clip_high))
    return (sums / batch.lengths if mean == "sequence" else sums).mean(1).sum()


def grpo(batch: Batch) -> Tensor:
    return clipped(batch, losses.group_advantages(batch.rewards), mean="sequence")


def dr_grpo(batch: Batch) -> Tensor:
    return clipped(batch, losses.group_advantages(batch.rewards, scale=False), mean="sum")


def dapo(batch: Batch) -> Tensor:
    return clipped(batch, losses.group_advantages(batch.rewards), clip_high=0.28, mean="sum")


def gspo(batch: Batch, clip_range: float) -> Tensor:
    means = batch.logprobs / batch.lengths, batch.old_logprobs / batch.lengths
    advantages = losses.group_advantages(batch.rewards)
    return losses.ppo_clip(*means, advantages, clip_low=clip_range, clip_high=clip_range).mean(1).sum()


def rebel(batch: Batch) -> Tensor:
    given = (pairs(each).flatten(0, 1) for each in (batch.logprobs, batch.old_logprobs, batch.rewards))
    return losses.rebel(*given).view(len(batch.rewards), -1).mean(1).sum()


def ppo(batch: Batch) -> Tensor:
    """With the sampler's exact values, better than any critic learns them; generalised advantages at λ = 1."""
    return clipped(batch, batch.rewards[..., None] - batch.values, mean="sum")


LOSSES: dict[str, Loss] = {
    "none": partial(p3o, clipping="none"),
    "joint": partial(p3o, clipping="joint"),
    "separate": partial(p3o, clipping="separate"),
    "rloo_ratios": partial(rloo, weighted=True),
    "exact_baseline": exact_baseline,
    "rloo": partial(rloo, weighted=False),
    "ppo": ppo,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "gspo": partial(gspo, clip_range=4e-4),
    "gspo_wide": partial(gspo, clip_range=0.03),
    "rebel": rebel,
}
