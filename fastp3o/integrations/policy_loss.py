"""P3O for trainers whose policy loss gets log-probabilities of padded responses, with the KL
already in the rewards.

B = P K rows, K responses to each of P prompts, siblings as neighbors; C positions.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastp3o.integrations.padded_pairs import METRICS
from fastp3o_kernels import P3OSettings, sequence_logprobs, token_p3o_loss


def p3o_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    responses_per_prompt: int,
    settings: P3OSettings,
    *,
    divisor: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mean loss over pairs, and METRICS over the pairs whose two responses are not empty.

    Args:
        logprobs, old_logprobs, mask: [B, C].
        advantages: [B, C]. A response's advantage is that at its first token: its reward less the
            cost of the KL, and less anything that its siblings share.
        settings: clipping is "joint", "separate" or "none"; kl_coef is 0, for the KL is in the
            advantages.
        divisor: divides the sum over prompts; P by default.

    Raises ValueError for a KL that would count twice, and if B is not a multiple of K.
    """
    if settings.kl_coef:
        raise ValueError(
            f"the KL is in the advantages here: kl_coef must be 0, got {settings.kl_coef}"
        )
    K, mask = responses_per_prompt, mask.bool()
    if K < 2 or len(mask) % K:
        raise ValueError(
            f"the microbatch has {len(mask)} responses, no multiple of the {K} to each prompt (2 or more)"
        )
    cu_seqlens = pad(mask.sum(dim=1).cumsum(0), (1, 0))
    # The loss sums in the same way, so that equal log-probs of any dtype have a ratio of 1.
    old = sequence_logprobs(old_logprobs.detach()[mask], cu_seqlens).view(-1, K)
    # An empty response has no first token, and its pairs no gradient.
    first = advantages.gather(1, mask.int().argmax(dim=1, keepdim=True))
    rewards = torch.where(mask.any(dim=1), first.squeeze(1), 0.0).view(-1, K)
    # Without a KL the reference is free.
    loss, metrics, _ = token_p3o_loss(
        logprobs[mask], cu_seqlens, old, old, rewards, settings, divisor=divisor
    )
    return loss, {f"p3o/{name}": metrics[name].item() for name in METRICS}
