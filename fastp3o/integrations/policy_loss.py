"""P3O for trainers that hand a policy loss log-probabilities of padded responses, and have put the KL in the reward.

B = P K responses, K to each of P prompts, side by side; C positions.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from fastp3o.integrations.padded_pairs import METRICS, p3o_of_pairs
from fastp3o_kernels import Groups, P3OSettings


def p3o_policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    responses_per_prompt: int,
    settings: P3OSettings,
    *,
    averaged_prompts: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The mean over pairs, and metrics: means over the pairs whose two responses are not empty.

    Args:
        logprobs, old_logprobs, advantages, mask: [B, C]. The advantage of a response is that at its first token: its
            reward, less anything that its siblings share, and less what the KL costs.
        settings: clipping is "joint", "separate" or "none"; kl_coef is 0, for the KL is in the advantages.
        averaged_prompts: what the mean is over, P by default.

    Raises ValueError for a KL that would be counted twice, and where B is no multiple of K.
    """
    if settings.kl_coef:
        raise ValueError(f"the KL is in the advantages here: kl_coef must be 0, got {settings.kl_coef}")
    B, K = len(logprobs), responses_per_prompt
    check_whole_groups(B, K)
    mask = mask.bool()
    rewards = of_responses(advantages, mask).view(-1, K)
    cu_seqlens = pad(mask.sum(dim=1).cumsum(0), (1, 0))
    # Added up as the policy's own are, so that equal log-probs have a ratio of 1 in any dtype.
    old = Groups(old_logprobs.detach()[mask], cu_seqlens, K, {}).logprobs
    groups = Groups(logprobs[mask], cu_seqlens, K, {"rewards": rewards.detach(), "old_logprobs": old})
    loss, sums = p3o_of_pairs(settings)(groups)
    pairs = (B // K if averaged_prompts is None else averaged_prompts) * K * (K - 1) / 2
    counted = sums["pairs"].clamp(min=1)
    return loss / pairs, {f"p3o/{name}": (sums[name] / counted).item() for name in METRICS}


def of_responses(values: Tensor, mask: Tensor) -> Tensor:
    """Each response's value at its first token, [B, C] -> [B]; 0 where it has none."""
    first = mask.int().argmax(dim=1, keepdim=True)
    return torch.where(mask.any(dim=1), values.gather(1, first).squeeze(1), 0.0)


def check_whole_groups(responses: int, responses_per_prompt: int, remedy: str = "") -> None:
    if responses_per_prompt < 2 or responses % responses_per_prompt:
        raise ValueError(
            f"the microbatch has {responses} responses, which is no multiple of the {responses_per_prompt} to each "
            f"prompt (2 or more). {remedy}".rstrip()
        )


def check_siblings(advantages: Tensor, mask: Tensor, responses_per_prompt: int, remedy: str) -> None:
    """Advantages less their group's mean add up to 0 over siblings.

    Raises ValueError where they do not: these are responses to different prompts; and where a part of a prompt's is
    missing.
    """
    check_whole_groups(len(mask), responses_per_prompt, remedy)
    mask = mask.bool()
    complete = mask.any(dim=1).view(-1, responses_per_prompt).all(dim=1)
    groups = of_responses(advantages, mask).view(-1, responses_per_prompt)[complete].float()
    wrong = groups.sum(dim=1).abs() > 1e-3 * (1 + groups.abs().amax(dim=1))
    if wrong.any():
        raise ValueError(
            f"in {int(wrong.sum())} of {len(groups)} groups of {responses_per_prompt} neighbours the advantages do not "
            f"add up to 0: they are no responses to one prompt, or not less the mean of their group. {remedy}"
        )
