"""P3O's loss as a PyTorch graph: the oracle of the tests, the CPU's implementation, the baseline of the benchmarks.

N tokens, P prompts with K responses each (sequence K p + k is response k of prompt p), Q pairs of responses to the same
prompt (Q = P K (K − 1) / 2). fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.p3o.output import METRICS, P3OLossOutput
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import LOG_RATIO_LIMIT, P3OSettings
from fastp3o_kernels.rows.eager import at_least_fp32, sequence_logprobs


def token_loss(
    token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings, *, on_policy: bool = False
) -> P3OLossOutput:
    """The loss from log-probs of tokens [N], in any clipping mode.

    on_policy: values come from old_logprobs, and only the gradient from token_logprobs.
    """
    if on_policy:
        old_logprobs, pairs = pairs.on_policy(len(token_logprobs), token_logprobs.dtype)
        token_logprobs = old_logprobs + (token_logprobs - token_logprobs.detach())
    if settings.clipping == "token":
        return token_clipped_loss(token_logprobs, pairs, settings)
    logprobs = sequence_logprobs(token_logprobs, pairs.cu_seqlens).view(pairs.rewards.shape)
    return response_loss(logprobs, pairs, settings)


def response_loss(logprobs: Tensor, pairs: PairInputs, settings: P3OSettings) -> P3OLossOutput:
    """[P, K] -> the mean over pairs of the joint, separate or unclipped loss (arXiv 2310.00212, P3O-V2 and V1)."""
    prompts = len(logprobs)
    logprobs, old_logprobs, ref_logprobs, rewards = all_pairs(logprobs, pairs)
    q = advantage_difference(logprobs, old_logprobs, ref_logprobs, rewards, settings)
    log_ratios = logprobs - old_logprobs
    epsilon = settings.clip_range

    if settings.clipping == "separate":
        ratios = exp_limited(log_ratios)
        weights = ratios.detach().clamp(1 / settings.ratio_cap, settings.ratio_cap).flip(1)
        signed_advantage = torch.stack([-q, q], dim=1) * weights
        clipped_ratios = ratios.clamp(1 - epsilon, 1 + epsilon)
        losses = torch.maximum(signed_advantage * ratios, signed_advantage * clipped_ratios)
        outside = clipped_ratios != ratios
        zero = (signed_advantage * clipped_ratios > signed_advantage * ratios) | (signed_advantage == 0)
        zero_pairs = zero.all(dim=1)
        loss = losses.sum(dim=1).mean() / 2
    else:
        weighted_advantage = -q * joint_weight(log_ratios, settings)
        difference = preference(logprobs, ref_logprobs)
        old_difference = preference(old_logprobs, ref_logprobs)
        clipped_difference = torch.clamp(difference, old_difference - epsilon, old_difference + epsilon)
        unclipped_losses = weighted_advantage * difference
        outside = clipped_difference != difference
        zero_pairs = weighted_advantage == 0
        if settings.clipping == "joint":
            clipped_losses = weighted_advantage * clipped_difference
            zero_pairs = zero_pairs | (clipped_losses > unclipped_losses)
            loss = torch.maximum(unclipped_losses, clipped_losses).mean() / 2
        else:
            loss = unclipped_losses.mean() / 2
    zero_prompts = zero_pairs.view(prompts, -1).all(dim=1)
    return P3OLossOutput(loss, loss_metrics(q, logprobs, log_ratios, ref_logprobs, outside, zero_prompts))


def token_clipped_loss(token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings) -> P3OLossOutput:
    """The first author's later variant: every token is clipped for itself in each pair of its response; the mean is
    over these N (K − 1) cases.
    """
    assert pairs.old_token_logprobs is not None  # inputs are checked before
    token_logprobs, old_token_logprobs = at_least_fp32(token_logprobs), at_least_fp32(pairs.old_token_logprobs)
    cu_seqlens, (P, K) = pairs.cu_seqlens, pairs.rewards.shape
    response_logprobs = sequence_logprobs(token_logprobs, cu_seqlens).view(P, K)
    logprobs, old_logprobs, ref_logprobs, rewards = all_pairs(response_logprobs, pairs)
    q = advantage_difference(logprobs, old_logprobs, ref_logprobs, rewards, settings)
    log_ratios = logprobs - old_logprobs
    weighted_advantage = (-q * joint_weight(log_ratios, settings)).view(P, -1)

    # Of response i in its pair with j, [P, i, j].
    first, second = torch.triu_indices(K, K, offset=1)
    weights = weighted_advantage.new_zeros(P, K, K)
    weights[:, first, second], weights[:, second, first] = weighted_advantage, -weighted_advantage
    lengths = cu_seqlens.long().diff()
    positive, negative = (
        part.sum(dim=2).flatten().repeat_interleave(lengths, output_size=len(token_logprobs))
        for part in (weights.clamp(min=0), weights.clamp(max=0))
    )
    clipped = torch.clamp(
        token_logprobs, old_token_logprobs - settings.clip_range, old_token_logprobs + settings.clip_range
    )
    # max(w logprob, w clipped) is the larger of the two where w is positive, the smaller where it is negative.
    losses = positive * torch.maximum(token_logprobs, clipped) + negative * torch.minimum(token_logprobs, clipped)
    loss = losses.sum() / (len(token_logprobs) * (K - 1))

    below = torch.where(token_logprobs < clipped, negative, positive + negative)
    gradient = torch.where(token_logprobs > clipped, positive, below)
    has_gradient = sequence_logprobs((gradient != 0).to(logprobs.dtype), cu_seqlens).view(P, K).sum(dim=1) > 0
    metrics = loss_metrics(q, logprobs, log_ratios, ref_logprobs, clipped != token_logprobs, ~has_gradient)
    return P3OLossOutput(loss, metrics)


def all_pairs(logprobs: Tensor, pairs: PairInputs) -> list[Tensor]:
    """log π, log π_old, log π_ref and rewards of the two responses of each pair, [Q, 2] each, of [P, K]."""
    K = logprobs.shape[1]
    first, second = torch.triu_indices(K, K, offset=1)
    responses = (at_least_fp32(t) for t in (logprobs, pairs.old_logprobs, pairs.ref_logprobs, pairs.rewards))
    return [torch.stack([values[:, first], values[:, second]], dim=2).flatten(0, 1) for values in responses]


def advantage_difference(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, settings: P3OSettings
) -> Tensor:
    """q = sg((r1 − r2) − β ((log π/π_ref)(y1) − (log π/π_ref)(y2))), [Q]; π is the current or the rollout policy."""
    policy = logprobs if settings.kl_reward == "current" else old_logprobs
    return (rewards[:, 0] - rewards[:, 1] - settings.kl_coef * preference(policy, ref_logprobs)).detach()


def preference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """How much more than the reference a policy prefers y1 to y2, [Q]: u of the joint loss."""
    log_ratios = logprobs - ref_logprobs
    return log_ratios[:, 0] - log_ratios[:, 1]


def joint_weight(log_ratios: Tensor, settings: P3OSettings) -> Tensor:
    """c = sg(clip(ρ1 ρ2, 1/C, C)), [Q]."""
    return exp_limited(log_ratios.sum(dim=1)).clamp(1 / settings.ratio_cap, settings.ratio_cap).detach()


def exp_limited(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def loss_metrics(
    q: Tensor, logprobs: Tensor, log_ratios: Tensor, ref_logprobs: Tensor, outside: Tensor, zero_prompts: Tensor
) -> dict[str, Tensor]:
    ratios = exp_limited(log_ratios)
    values = (
        ratios.mean(),
        ratios.max(),
        outside.float().mean(),
        q.abs().mean(),
        zero_prompts.float().mean(),
        (logprobs - ref_logprobs).mean(),
    )
    return {name: value.detach().float() for name, value in zip(METRICS, values, strict=True)}
