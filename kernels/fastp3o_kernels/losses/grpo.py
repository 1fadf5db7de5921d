"""Group relative policy optimization and its kin: losses of tokens [n], from advantages of each token's response.

They differ in the advantages and in what the sum over tokens is divided by:

    GRPO      grpo, group_advantages; the mean over a response's tokens, then over responses
    Dr. GRPO  ppo_clip, group_advantages(scale=False); the sum over tokens by a constant, the longest response
    DAPO      dapo, group_advantages; the mean over all tokens of the batch; groups of equal rewards are sampled again
    GRPO+     grpo_plus: DAPO's, responses that were cut off left out, no KL, no entropy bonus

P prompts with K responses each.
"""

from torch import Tensor

from fastp3o_kernels.losses.kl import k3
from fastp3o_kernels.losses.ppo_clip import ppo_clip

# Added to the standard deviation by DeepSeek's successors and TRL.
SMALL = 1e-4


def group_advantages(rewards: Tensor, *, scale: bool = True) -> Tensor:
    """(r − mean) / (std + small) within each prompt's responses, [P, K] -> [P, K] (arXiv 2402.03300).

    The deviation is that of a sample, by K − 1. scale=False leaves it out (Dr. GRPO, arXiv 2503.20783).
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
    """max(−A ρ, −A clip(ρ, 1 ± ε)) + β k3 (arXiv 2402.03300, equation 3), [n]; without a reference no KL."""
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
    """Clipped farther above than below, without KL (arXiv 2503.14476, equation 8), [n]."""
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
    """DAPO's loss of the responses that came to their end, [n] (DeepCoder, Agentica 2025). complete: [n] bool."""
    losses = dapo(token_logprobs, old_token_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    return losses.masked_fill(~complete, 0.0)


def overlong_penalty(lengths: Tensor, *, longest: int, margin: int) -> Tensor:
    """DAPO's soft punishment to add to rewards, any shape: 0 up to longest − margin tokens, then falling to −1 at
    `longest` (arXiv 2503.14476, equation 13).

    Raises ValueError unless 0 < margin <= longest.
    """
    if not 0 < margin <= longest:
        raise ValueError(f"margin must be above 0 and at most longest ({longest}), got {margin}")
    return ((longest - margin - lengths) / margin).clamp(-1.0, 0.0)
