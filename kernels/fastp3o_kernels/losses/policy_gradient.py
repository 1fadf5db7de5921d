"""Losses of responses or tokens with advantages: REINFORCE, RLOO, PPO's clipping, GRPO and its kin, REBEL, Nash-MD.

GRPO and its kin differ in the advantages and in what the sum over tokens is divided by:

    GRPO      grpo, group_advantages; the mean over a response's tokens, then over responses
    Dr. GRPO  ppo_clip, group_advantages(scale=False); the sum over tokens divided by a constant, the longest response
    DAPO      dapo, group_advantages; the mean over all tokens of the batch; groups of equal rewards are sampled again
    GRPO+     grpo_plus: DAPO without responses that were cut off, no KL, no entropy bonus

P prompts with K responses each, n tokens. ρ = π / π_old, A the advantage, r the reward.
"""

import torch
from torch import Tensor

from fastp3o_kernels.losses.kl import k3

# Added to the standard deviation, as DeepSeek's successors and TRL do.
SMALL = 1e-4


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """−A log π of each response or token (Williams 1992), A = r − b for any baseline b that it does not depend on.

    On-policy: the policy that is differentiated has sampled. Any shape.
    """
    return -advantages.detach() * logprobs


def rloo_advantages(rewards: Tensor) -> Tensor:
    """REINFORCE leave-one-out (Kool, van Hoof and Welling 2019; arXiv 2402.14740): r less the mean reward of the
    prompt's other K − 1 responses, [P, K] -> [P, K].

    Raises ValueError if K is 1.
    """
    K = rewards.shape[1]
    if K < 2:
        raise ValueError("leave-one-out advantages need 2 responses or more to a prompt, got rewards of shape [P, 1]")
    return (rewards - rewards.mean(1, keepdim=True)) * (K / (K - 1))


def ppg(logprobs: Tensor, rewards: Tensor) -> Tensor:
    """The pairwise policy gradient, on-policy (arXiv 2310.00212, equation 6): −(r1 − r2) / 2 (log π(y1) − log π(y2)),
    the mean over pairs of a prompt's responses, [P, K] -> [P].

    That mean is −Σ (r − mean r) log π / (K − 1), a K-th of the sum that RLOO takes.
    """
    K = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    return reinforce(logprobs, centred).sum(1) / (K - 1)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float | None = None,
) -> Tensor:
    """PPO's clipped ratio of each token or response (arXiv 1707.06347): max(−A ρ, −A clip(ρ, 1 − ε_low, 1 + ε_high)).

    Any shape. clip_high: clip_low by default; a larger one is DAPO's "clip-higher" (arXiv 2503.14476).
    """
    ratios = (logprobs - old_logprobs.detach()).exp()
    clipped = ratios.clamp(1 - clip_low, 1 + (clip_low if clip_high is None else clip_high))
    advantages = advantages.detach()
    return torch.maximum(-advantages * ratios, -advantages * clipped)


def group_advantages(rewards: Tensor, *, scale: bool = True) -> Tensor:
    """(r − mean) / (std + small) within each prompt's responses, [P, K] -> [P, K] (arXiv 2402.03300).

    The deviation is that of a sample, divided by K − 1. scale=False leaves it out (Dr. GRPO, arXiv 2503.20783).
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    return centred / (rewards.std(1, keepdim=True) + SMALL) if scale else centred


def grpo(
    token_logprobs: Tensor,
    old_token_logprobs: Tensor,
    advantages: Tensor,
    ref_token_logprobs: Tensor | None = None,
    *,
    clip_range: float = 0.2,
    kl_coef: float = 0.04,
) -> Tensor:
    """Group relative policy optimization (arXiv 2402.03300, equation 3): max(−A ρ, −A clip(ρ, 1 ± ε)) + β k3, [n].

    advantages: of each token's response. Without a reference there is no KL.
    """
    losses = ppo_clip(token_logprobs, old_token_logprobs, advantages, clip_low=clip_range)
    if ref_token_logprobs is None:
        return losses
    return losses + kl_coef * k3(token_logprobs, ref_token_logprobs)


def dapo(
    token_logprobs: Tensor,
    old_token_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """DAPO (arXiv 2503.14476, equation 8): clipped farther above than below, without KL, [n]."""
    return ppo_clip(token_logprobs, old_token_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)


def grpo_plus(
    token_logprobs: Tensor,
    old_token_logprobs: Tensor,
    advantages: Tensor,
    complete: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Tensor:
    """GRPO+ (DeepCoder, Agentica 2025): DAPO's loss of responses that came to their end, [n]. complete: [n] bool."""
    losses = dapo(token_logprobs, old_token_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    return losses.masked_fill(~complete, 0.0)


def gspo(
    mean_logprobs: Tensor,
    old_mean_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Group sequence policy optimization (arXiv 2507.18071): max(−A s, −A clip(s)), s = ρ(y)^(1 / |y|); any shape.

    That is PPO's loss of the geometric mean of a response's token ratios; the defaults are the paper's.
    mean_logprobs: means over the tokens of each response.
    """
    return ppo_clip(mean_logprobs, old_mean_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)


def rebel(logprobs: Tensor, old_logprobs: Tensor, rewards: Tensor, *, eta: float = 1.0) -> Tensor:
    """Regression to relative rewards (REBEL, arXiv 2404.16767, equation 1) of pairs of responses, [P, 2] -> [P].

    ((log ρ(y1) − log ρ(y2)) / η − (r1 − r2))².
    """
    log_ratios = logprobs - old_logprobs.detach()
    rewards = rewards.detach()
    difference = log_ratios[:, 0] - log_ratios[:, 1]
    return (difference / eta - (rewards[:, 0] - rewards[:, 1])).square()


def nash_md(logprobs: Tensor, ref_logprobs: Tensor, preferred: Tensor, *, tau: float = 0.1) -> Tensor:
    """Nash learning by mirror descent (Nash-MD, arXiv 2312.00886, section 7) of each response y; any shape.

    −(P(y ≻ y′) − ½ − τ log π/π_ref(y)) log π(y) with the bracket detached. preferred: P(y ≻ y′), the probability that y
    is preferred to y′, which is sampled from the geometric mixture π^(1 − β) π_ref^β of policy and reference. ½ is the
    baseline.
    """
    advantages = preferred - 0.5 - tau * (logprobs - ref_logprobs)
    return -advantages.detach() * logprobs
