"""P3O's loss as a PyTorch graph: the oracle of the tests, the CPU's implementation, the baseline of the benchmarks.

N tokens, P prompts with K responses each (sequence K p + k is response k of prompt p), Q pairs of responses to the same
prompt (Q = P K (K − 1) / 2). fp64 inputs are computed in fp64; narrower ones in fp32.
"""

import torch
from torch import Tensor

from fastp3o_kernels.losses import truncated_ratios
from fastp3o_kernels.p3o.output import METRICS, SAMPLER_METRICS, P3OLossOutput
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import LOG_RATIO_LIMIT, P3OSettings
from fastp3o_kernels.rows.oracle import at_least_fp32, sequence_logprobs


def token_loss(token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings) -> P3OLossOutput:
    """The loss from log-probs of tokens [N], in any clipping mode."""
    logprobs = sequence_logprobs(token_logprobs, pairs.cu_seqlens).view(pairs.rewards.shape)
    old = logprobs.detach() if pairs.old_logprobs is None else pairs.old_logprobs
    if settings.clipping == "token":
        return token_clipped_loss(token_logprobs, old, pairs, settings)
    return response_loss(logprobs, old, pairs, settings)


def response_loss(logprobs: Tensor, old: Tensor, pairs: PairInputs, settings: P3OSettings) -> P3OLossOutput:
    """log π and log π_old [P, K] -> the mean over pairs of the joint, separate or unclipped loss.

    arXiv 2310.00212 calls them P3O-V2 and V1, and an ablation.
    """
    counts, responses = all_pairs(logprobs, old, pairs)
    pair_logprobs, old_logprobs, ref_logprobs, rewards = responses
    q = advantage_difference(pair_logprobs, old_logprobs, ref_logprobs, rewards, settings)
    means = {"advantage_mean_abs": (q.abs(), counts)}
    if (sampler_ratios := pair_sampler_ratios(old, pairs, settings)) is not None:
        q = q * sampler_ratios
    log_ratios = pair_logprobs - old_logprobs
    epsilon = settings.clip_range

    if settings.clipping == "separate":
        ratios = exp_limited(log_ratios)
        weights = ratios.detach().clamp(1 / settings.ratio_cap, settings.ratio_cap).flip(1)
        signed_advantage = torch.stack([-q, q], dim=1) * weights
        clipped_ratios = ratios.clamp(1 - epsilon, 1 + epsilon)
        losses = torch.maximum(signed_advantage * ratios, signed_advantage * clipped_ratios).sum(dim=1)
        zero = (signed_advantage * clipped_ratios > signed_advantage * ratios) | (signed_advantage == 0)
        zero_pairs = zero.all(dim=1)
        response_ratios = exp_limited(logprobs.detach() - old)
        outside = response_ratios.clamp(1 - epsilon, 1 + epsilon) != response_ratios
        means["clip_fraction"] = outside, pairs.in_pairs
    else:
        weighted_advantage = -q * joint_weight(log_ratios, settings)
        difference = preference(pair_logprobs, ref_logprobs)
        old_difference = preference(old_logprobs, ref_logprobs)
        clipped_difference = torch.clamp(difference, old_difference - epsilon, old_difference + epsilon)
        losses = weighted_advantage * difference
        zero_pairs = weighted_advantage == 0
        if settings.clipping == "joint":
            clipped_losses = weighted_advantage * clipped_difference
            zero_pairs = zero_pairs | (clipped_losses > losses)
            losses = torch.maximum(losses, clipped_losses)
        means["clip_fraction"] = clipped_difference != difference, counts
    loss = losses.sum() / (2 * pairs.pairs_per_prompt * pairs.divisor)
    zero_prompts = zero_pairs.view(-1, pairs.pairs_per_prompt).all(dim=1)
    return loss_output(loss, logprobs, old, pairs, settings, zero_prompts, sampler_ratios, counts, means)


def token_clipped_loss(token_logprobs: Tensor, old: Tensor, pairs: PairInputs, settings: P3OSettings) -> P3OLossOutput:
    """The first author's later variant: every token is clipped separately in each pair of its response. The mean is
    over these N (K − 1) cases.
    """
    cu_seqlens, (P, K) = pairs.cu_seqlens, pairs.rewards.shape
    old_token_logprobs = token_logprobs.detach() if pairs.old_token_logprobs is None else pairs.old_token_logprobs
    N, lengths = len(token_logprobs), cu_seqlens.long().diff()

    def per_token(responses: Tensor) -> Tensor:
        return responses.flatten().repeat_interleave(lengths, output_size=N)

    counted_tokens = per_token(pairs.in_pairs)
    token_logprobs, old_token_logprobs = (
        at_least_fp32(values).masked_fill(~counted_tokens, 0.0) for values in (token_logprobs, old_token_logprobs)
    )
    response_logprobs = sequence_logprobs(token_logprobs, cu_seqlens).view(P, K)
    counts, responses = all_pairs(response_logprobs, old, pairs)
    logprobs, old_logprobs, ref_logprobs, rewards = responses
    q = advantage_difference(logprobs, old_logprobs, ref_logprobs, rewards, settings)
    means = {"advantage_mean_abs": (q.abs(), counts)}
    if (sampler_ratios := pair_sampler_ratios(old, pairs, settings)) is not None:
        q = q * sampler_ratios
    weighted_advantage = -q * joint_weight(logprobs - old_logprobs, settings)

    # Weight of response i in its pair with j, [P, i, j].
    first, second = pair_indices(K, token_logprobs.device)
    weights = weighted_advantage.new_zeros(P, K, K)
    weighted_advantage = weighted_advantage.view(-1, pairs.pairs_per_prompt)
    weights[:, first, second], weights[:, second, first] = weighted_advantage, -weighted_advantage
    positive, negative = (per_token(part.sum(dim=2)) for part in (weights.clamp(min=0), weights.clamp(max=0)))
    clipped = torch.clamp(
        token_logprobs, old_token_logprobs - settings.clip_range, old_token_logprobs + settings.clip_range
    )
    # max(w logprob, w clipped) is the larger of the two if w is positive, the smaller if it is negative.
    losses = positive * torch.maximum(token_logprobs, clipped) + negative * torch.minimum(token_logprobs, clipped)
    loss = losses.sum() / ((K - 1) * pairs.divisor)

    below = torch.where(token_logprobs < clipped, negative, positive + negative)
    gradient = torch.where(token_logprobs > clipped, positive, below)
    has_gradient = sequence_logprobs((gradient != 0).to(logprobs.dtype), cu_seqlens).view(P, K).sum(dim=1) > 0
    means["clip_fraction"] = clipped != token_logprobs, counted_tokens
    return loss_output(loss, response_logprobs, old, pairs, settings, ~has_gradient, sampler_ratios, counts, means)


def all_pairs(logprobs: Tensor, old: Tensor, pairs: PairInputs) -> tuple[Tensor, list[Tensor]]:
    """Flags of the pairs that count, [Q], and from [P, K] each: log π, log π_old, log π_ref and rewards of every pair's
    two responses, [Q, 2]. All are 0 in a pair that does not count: so are its advantage difference, loss and gradient.
    """
    first, second = pair_indices(logprobs.shape[1], logprobs.device)

    def pair_values(values: Tensor) -> Tensor:
        return torch.stack([values[:, first], values[:, second]], dim=2).flatten(0, 1)

    counts = pair_values(pairs.in_pairs).all(dim=1)
    responses = (at_least_fp32(t) for t in (logprobs, old, pairs.ref_logprobs, pairs.rewards))
    return counts, [pair_values(values).masked_fill(~counts.unsqueeze(1), 0.0) for values in responses]


def pair_indices(K: int, device: torch.device) -> Tensor:
    """The two responses of each pair of a prompt's, [2, K (K − 1) / 2]. On the device, for which the host does not wait
    then.
    """
    return torch.triu_indices(K, K, offset=1, device=device)


def advantage_difference(
    logprobs: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor, rewards: Tensor, settings: P3OSettings
) -> Tensor:
    """q = sg((r1 − r2) − β ((log π/π_ref)(y1) − (log π/π_ref)(y2))), [Q]; π is the current or the rollout policy."""
    policy = logprobs if settings.kl_reward == "current" else old_logprobs
    return (rewards[:, 0] - rewards[:, 1] - settings.kl_coef * preference(policy, ref_logprobs)).detach()


def pair_sampler_ratios(old: Tensor, pairs: PairInputs, settings: P3OSettings) -> Tensor | None:
    """The importance weights min(π_old/μ(y1) π_old/μ(y2), C), [Q], of pairs that μ sampled; None if they have none.

    old: log π_old, [P, K].
    """
    if pairs.sampler_logprobs is None:
        return None
    log_ratios = at_least_fp32(old) - at_least_fp32(pairs.sampler_logprobs)
    log_ratios = log_ratios.masked_fill(~pairs.in_pairs, 0.0)
    first, second = pair_indices(old.shape[1], old.device)
    return truncated_ratios(log_ratios[:, first] + log_ratios[:, second], settings.sampler_ratio_cap).flatten()


def preference(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """A policy's preference of y1 over y2 less the reference's, [Q]: u of the joint loss."""
    log_ratios = logprobs - ref_logprobs
    return log_ratios[:, 0] - log_ratios[:, 1]


def joint_weight(log_ratios: Tensor, settings: P3OSettings) -> Tensor:
    """c = sg(clip(ρ1 ρ2, 1/C, C)), [Q]."""
    return exp_limited(log_ratios.sum(dim=1)).clamp(1 / settings.ratio_cap, settings.ratio_cap).detach()


def exp_limited(log_ratios: Tensor) -> Tensor:
    return log_ratios.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def loss_output(
    loss: Tensor,
    logprobs: Tensor,
    old: Tensor,
    pairs: PairInputs,
    settings: P3OSettings,
    zero_prompts: Tensor,
    sampler_ratios: Tensor | None,
    pairs_that_count: Tensor,
    means: dict[str, tuple[Tensor, Tensor]],
) -> P3OLossOutput:
    """logprobs, old: [P, K]. zero_prompts: [P] bool, without a gradient. sampler_ratios, pairs_that_count: [Q].

    means: further metrics, as values and flags of those that count.
    """
    in_pairs, logprobs = pairs.in_pairs, logprobs.detach()
    ratios = exp_limited(logprobs - old).masked_fill(~in_pairs, 0.0)
    means |= {
        "ratio_mean": (ratios, in_pairs),
        "zero_gradient_fraction": (zero_prompts, in_pairs.any(dim=1)),
        "kl": (logprobs - pairs.ref_logprobs, in_pairs),
    }
    if sampler_ratios is not None:
        means["sampler_ratio_mean"] = sampler_ratios, pairs_that_count
        means["sampler_ratio_capped"] = sampler_ratios >= settings.sampler_ratio_cap, pairs_that_count
    metrics, counts = {}, {}
    for name in METRICS | SAMPLER_METRICS:
        if name in means:
            values, flags = means[name]
            counts[name] = flags.sum(dtype=torch.float32)
            total = at_least_fp32(values).masked_fill(~flags, 0.0).sum()
            metrics[name] = (total / counts[name].clamp(min=1)).float()
        elif name == "ratio_max":
            metrics[name] = torch.nn.functional.pad(ratios.flatten(), (0, 1)).max().float()  # 0 if there is none
    return P3OLossOutput(loss, metrics, counts)
