"""P3O's loss as a PyTorch graph: what a CPU computes, and the baseline of the benchmarks.

N tokens, P prompts with K responses each (sequence K p + k is response k of prompt p), Q pairs of
responses to the same prompt (Q = P K (K − 1) / 2). fp64 inputs are computed in fp64; narrower ones
in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.p3o.pairs import Pairs
from fastp3o_kernels.p3o.settings import (
    LOG_RATIO_LIMIT,
    METRICS,
    SAMPLER_METRICS,
    P3OLossOutput,
    P3OSettings,
    truncated_ratios,
)
from fastp3o_kernels.rows.eager import at_least_fp32, sequence_logprobs


def token_loss(token_logprobs: Tensor, pairs: Pairs, settings: P3OSettings) -> P3OLossOutput:
    """The loss from log-probs of tokens [N]: the mean over pairs of the joint, separate or
    unclipped loss, which arXiv 2310.00212 calls P3O-V2, V1 and an ablation. Or the first author's
    later variant, where every token is clipped separately in each pair of its response: the mean
    over these N (K − 1) cases.
    """
    (P, K), Q, epsilon = pairs.rewards.shape[:2], pairs.pairs_per_prompt, settings.clip_range
    logprobs = sequence_logprobs(token_logprobs, pairs.cu_seqlens).view(P, K)
    old = logprobs.detach() if pairs.old_logprobs is None else pairs.old_logprobs
    lengths = pairs.cu_seqlens.long().diff()

    def per_token(responses: Tensor) -> Tensor:
        return responses.flatten().repeat_interleave(lengths, output_size=len(token_logprobs))

    if settings.clipping == "token":
        counted_tokens = per_token(pairs.in_pairs)
        old_tokens = (
            token_logprobs.detach()
            if pairs.old_token_logprobs is None
            else pairs.old_token_logprobs
        )
        token_logprobs, old_tokens = (
            at_least_fp32(values).masked_fill(~counted_tokens, 0.0)
            for values in (token_logprobs, old_tokens)
        )
        logprobs = sequence_logprobs(token_logprobs, pairs.cu_seqlens).view(P, K)
    # All are 0 in a pair that does not count: so are its advantage difference, loss and gradient.
    counts = pair_values(pairs.in_pairs).all(dim=1)
    pair_logprobs, old_logprobs, ref_logprobs = (
        pair_values(at_least_fp32(values)).masked_fill(~counts.unsqueeze(1), 0.0)
        for values in (logprobs, old, pairs.ref_logprobs)
    )
    reward_differences = pairs.reward_differences.masked_fill(~counts, 0.0)
    log_ratios = pair_logprobs - old_logprobs
    u, u_old = preference(pair_logprobs, ref_logprobs), preference(old_logprobs, ref_logprobs)
    policys = u if settings.kl_reward == "current" else u_old
    q = (reward_differences - settings.kl_coef * policys).detach()
    means = {"advantage_mean_abs": (q.abs(), counts)}
    if pairs.sampler_logprobs is not None:
        # Importance weights of pairs: min(π_old/μ(y1) π_old/μ(y2), C).
        to_sampler = (at_least_fp32(old) - at_least_fp32(pairs.sampler_logprobs)).masked_fill(
            ~pairs.in_pairs, 0.0
        )
        weights = truncated_ratios(pair_values(to_sampler).sum(dim=1), settings.sampler_ratio_cap)
        q = q * weights
        means["sampler_ratio_mean"] = weights, counts
        means["sampler_ratio_capped"] = weights >= settings.sampler_ratio_cap, counts
    ratios = exp_limited(logprobs.detach() - old).masked_fill(~pairs.in_pairs, 0.0)
    # Of all but the separate loss: −q c, c = sg(clip(ρ1 ρ2, 1/C, C)).
    joint_ratios = exp_limited(log_ratios.sum(dim=1)).clamp(
        1 / settings.ratio_cap, settings.ratio_cap
    )
    weighted_advantage = -q * joint_ratios.detach()

    if settings.clipping == "separate":
        pair_ratios = exp_limited(log_ratios)
        weights = pair_ratios.detach().clamp(1 / settings.ratio_cap, settings.ratio_cap).flip(1)
        signed_advantage = torch.stack([-q, q], dim=1) * weights
        unclipped = signed_advantage * pair_ratios
        clipped = signed_advantage * pair_ratios.clamp(1 - epsilon, 1 + epsilon)
        losses = torch.maximum(unclipped, clipped).sum(dim=1)
        zero_prompts = ((clipped > unclipped) | (signed_advantage == 0)).view(-1, 2 * Q).all(dim=1)
        outside = ratios.clamp(1 - epsilon, 1 + epsilon) != ratios, pairs.in_pairs
    elif settings.clipping == "token":
        # Weight of response i in its pair with j, [P, i, j].
        first, second = pair_indices(K, token_logprobs.device)
        pair_weights = weighted_advantage.new_zeros(P, K, K)
        pair_weights[:, first, second] = weighted_advantage.view(-1, Q)
        pair_weights[:, second, first] = -weighted_advantage.view(-1, Q)
        parts = pair_weights.clamp(min=0), pair_weights.clamp(max=0)
        positive, negative = (per_token(part.sum(dim=2)) for part in parts)
        clipped = torch.clamp(token_logprobs, old_tokens - epsilon, old_tokens + epsilon)
        # max(w logprob, w clipped) is the larger of the two if w is positive, the smaller if it is
        # negative.
        losses = positive * torch.maximum(token_logprobs, clipped) + negative * torch.minimum(
            token_logprobs, clipped
        )
        below = torch.where(token_logprobs < clipped, negative, positive + negative)
        gradient = torch.where(token_logprobs > clipped, positive, below)
        with_gradient = sequence_logprobs((gradient != 0).to(losses.dtype), pairs.cu_seqlens).view(
            P, K
        )
        zero_prompts = with_gradient.sum(dim=1) == 0
        outside = clipped != token_logprobs, counted_tokens
    else:
        clipped = torch.clamp(u, u_old - epsilon, u_old + epsilon)
        losses, zero_pairs = weighted_advantage * u, weighted_advantage == 0
        if settings.clipping == "joint":
            zero_pairs = zero_pairs | (weighted_advantage * clipped > losses)
            losses = torch.maximum(losses, weighted_advantage * clipped)
        zero_prompts = zero_pairs.view(-1, Q).all(dim=1)
        outside = clipped != u, counts

    means |= {
        "ratio_mean": (ratios, pairs.in_pairs),
        "clip_fraction": outside,
        "zero_gradient_fraction": (zero_prompts, pairs.in_pairs.any(dim=1)),
        "kl": (logprobs.detach() - pairs.ref_logprobs, pairs.in_pairs),
    }
    metrics, counted = {}, {}
    for name in METRICS | SAMPLER_METRICS:
        if name in means:
            values, flags = means[name]
            counted[name] = flags.sum(dtype=torch.float32)
            total = at_least_fp32(values).masked_fill(~flags, 0.0).sum()
            metrics[name] = (total / counted[name].clamp(min=1)).float()
        elif name == "ratio_max":
            # 0 if there is none.
            metrics[name] = torch.nn.functional.pad(ratios.flatten(), (0, 1)).max().float()
    mean_over = K - 1 if settings.clipping == "token" else 2 * Q
    return P3OLossOutput(losses.sum() / (mean_over * pairs.divisor), metrics, counted)


def pair_values(values: Tensor) -> Tensor:
    """[P, K] -> the values of every pair's two responses, [Q, 2]."""
    first, second = pair_indices(values.shape[1], values.device)
    return torch.stack([values[:, first], values[:, second]], dim=2).flatten(0, 1)


def pair_indices(K: int, device: torch.device) -> Tensor:
    """The two responses of each pair of a prompt's, [2, K (K − 1) / 2]: on the device, so that no
    host waits.
    """
    return torch.triu_indices(K, K, offset=1, device=device)


def preference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """A policy's preference of y1 over y2 less the reference's, [Q]: u."""
    log_ratios = logprobs - ref_logprobs
    return log_ratios[:, 0] - log_ratios[:, 1]


def exp_limited(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
