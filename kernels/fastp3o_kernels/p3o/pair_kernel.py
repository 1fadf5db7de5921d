"""Token log-probs of pairs -> sequence sums, ratios, clipped loss, metrics and the gradient of every token.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p. K is 2 in the paper, where a
prompt's responses are one pair; more give K (K − 1) / 2 pairs, which count alike. In the kernels p is a prompt of a
tile, and i < j are the responses of a pair, called 1 and 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.p3o.output import RESULTS
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import LOG_RATIO_LIMIT, P3OSettings
from fastp3o_kernels.rows.sequence_kernel import BLOCK_T, WARPS, sequence_bounds, sequence_sums, zero_like

# One program does all prompts, a tile of them at a time: a mean over programs would need atomics, whose order varies,
# or a second launch. Tokens number at most a million or so (4 MB), little for one processor beside the head's products.
BLOCK_P = 2
# Pairs of a tile; a prompt with more of them in a square has a tile to itself.
LARGEST_TILE = 256

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)

# Where each number stands in the results.
LOSS = tl.constexpr(RESULTS.index("loss"))
RATIO_MEAN = tl.constexpr(RESULTS.index("ratio_mean"))
RATIO_MAX = tl.constexpr(RESULTS.index("ratio_max"))
CLIP_FRACTION = tl.constexpr(RESULTS.index("clip_fraction"))
ADVANTAGE_MEAN_ABS = tl.constexpr(RESULTS.index("advantage_mean_abs"))
ZERO_GRADIENT_FRACTION = tl.constexpr(RESULTS.index("zero_gradient_fraction"))
KL = tl.constexpr(RESULTS.index("kl"))


def block_sizes(K: int) -> dict[str, int]:
    block_k = triton.next_power_of_2(K)
    return {"BLOCK_P": max(1, min(BLOCK_P, LARGEST_TILE // block_k**2)), "BLOCK_K": block_k, "BLOCK_T": BLOCK_T}


@triton.jit
def clip(x, low, high):
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def pair_differences(x):
    """[p, K] -> x1 − x2 of all pairs, [p, i, j]."""
    return x[:, :, None] - x[:, None, :]


@triton.jit
def sums_over_pairs(x_1, x_2):
    """[p, i, j] of a pair's two responses -> the sum over the pairs of each response, [p, K]."""
    return tl.sum(x_1, axis=2) + tl.sum(x_2, axis=1)


@triton.jit
def separate_terms(q, log_ratio, ratio, clip_range, ratio_cap):
    """P3O-V1. The loss of each pair and its slopes in log π(y1) and log π(y2), [p, i, j]; which responses are outside
    the clip range, [p, K].
    """
    ratio_1, ratio_2 = ratio[:, :, None], ratio[:, None, :]
    weight_1 = -q * clip(ratio_2, 1 / ratio_cap, ratio_cap)
    weight_2 = q * clip(ratio_1, 1 / ratio_cap, ratio_cap)
    clipped = clip(ratio, 1 - clip_range, 1 + clip_range)
    clipped_1, clipped_2 = clipped[:, :, None], clipped[:, None, :]
    loss = larger(weight_1 * ratio_1, weight_1 * clipped_1) + larger(weight_2 * ratio_2, weight_2 * clipped_2)
    # A ratio at its limit is constant, and so is the loss where the clipped branch is the larger one.
    is_limited = tl.abs(log_ratio) > LIMIT
    is_flat_1 = is_limited[:, :, None] | (weight_1 * clipped_1 > weight_1 * ratio_1)
    is_flat_2 = is_limited[:, None, :] | (weight_2 * clipped_2 > weight_2 * ratio_2)
    slope_1 = tl.where(is_flat_1, 0.0, weight_1 * ratio_1)
    slope_2 = tl.where(is_flat_2, 0.0, weight_2 * ratio_2)
    return loss, slope_1, slope_2, clipped != ratio


@triton.jit
def joint_terms(q, u, u_clipped, log_ratio, ratio_cap, CLIPPING: tl.constexpr):
    """P3O-V2, or without its clipped branch. The loss of each pair and its slope in u, [p, i, j]."""
    joint_ratio = tl.exp(clip(log_ratio[:, :, None] + log_ratio[:, None, :], -LIMIT, LIMIT))
    weight = -q * clip(joint_ratio, 1 / ratio_cap, ratio_cap)
    loss, slope = weight * u, weight
    if CLIPPING == "joint":
        slope = tl.where(weight * u_clipped > weight * u, 0.0, weight)
        loss = larger(loss, weight * u_clipped)
    return loss, slope


@triton.jit
def store_coefficients(coefficients_ptr, coefficient, begin, end, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr):
    """The same coefficient for every token of a response."""
    longest = tl.max(end - begin, axis=0)
    done = zero_like(longest)
    while done < longest:
        tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
        token_coefficients = tl.broadcast_to(coefficient[:, None], [BLOCK_P, BLOCK_T])
        tl.store(coefficients_ptr + tokens, token_coefficients, mask=tokens < end[:, None])
        done += BLOCK_T


@triton.jit
def clip_tokens(
    logprobs_ptr,
    old_ptr,
    coefficients_ptr,
    positive_weight,  # sums of the positive and of the negative weights of a response in its pairs
    negative_weight,
    begin,
    end,
    clip_range,
    cases,  # that the loss is a mean over
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Stores the coefficient of every token of a response. Sums over its tokens: losses, tokens outside the clip range
    and tokens with a gradient.
    """
    losses = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    outside = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    with_gradient = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    positive, negative = positive_weight[:, None], negative_weight[:, None]
    longest = tl.max(end - begin, axis=0)
    done = zero_like(longest)
    while done < longest:
        tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
        mask = tokens < end[:, None]
        logprob = tl.load(logprobs_ptr + tokens, mask=mask, other=0.0)
        old = tl.load(old_ptr + tokens, mask=mask, other=0.0)
        clipped = clip(logprob, old - clip_range, old + clip_range)
        # max(w logprob, w clipped): the larger of the two where w is positive, the smaller where it is negative.
        slope = tl.where(logprob > clipped, positive, tl.where(logprob < clipped, negative, positive + negative))
        coefficient = slope / cases
        tl.store(coefficients_ptr + tokens, coefficient, mask=mask)
        losses += positive * larger(logprob, clipped) - negative * larger(-logprob, -clipped)
        outside += tl.where(mask & (clipped != logprob), 1.0, 0.0)
        with_gradient += tl.where(mask & (coefficient != 0.0), 1.0, 0.0)
        done += BLOCK_T
    return tl.sum(losses, axis=1), tl.sum(outside, axis=1), tl.sum(with_gradient, axis=1)


@triton.jit(do_not_specialize=["P", "N", "averaged_prompts"])
def pair_kernel(
    logprobs_ptr,  # [N] fp32, of tokens
    cu_seqlens_ptr,  # [P K + 1]
    old_logprobs_ptr,  # [P, K] fp32
    ref_logprobs_ptr,  # [P, K] fp32
    rewards_ptr,  # [P, K] fp32
    old_token_logprobs_ptr,  # [N] fp32, where CLIPPING is "token"
    sums_ptr,  # [P, K] fp32, scratch: log π(y|x)
    response_coefficients_ptr,  # [P, K] fp32, scratch, where CLIPPING is not "token": dL/d log π(y|x)
    positive_weights_ptr,  # [P, K] fp32, scratch, where it is: sum of a response's positive weights in its pairs
    negative_weights_ptr,  # [P, K] fp32, scratch, where it is: sum of its negative ones
    coefficients_ptr,  # [N] fp32, out: dL/d log π of each token
    results_ptr,  # [7] fp32, out: RESULTS
    P,
    N,  # tokens that the loss averages over where CLIPPING is "token"
    averaged_prompts,  # prompts that it averages over elsewhere: P, or more where this launch sees a part of them
    clip_range,
    ratio_cap,
    kl_coef,
    CLIPPING: tl.constexpr,
    KL_REWARD: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    losses = tl.zeros([BLOCK_P], dtype=tl.float32)
    ratios = tl.zeros([BLOCK_P], dtype=tl.float32)
    ratio_max = tl.zeros([BLOCK_P], dtype=tl.float32)
    outside = tl.zeros([BLOCK_P], dtype=tl.float32)
    advantages = tl.zeros([BLOCK_P], dtype=tl.float32)
    without_gradient = tl.zeros([BLOCK_P], dtype=tl.float32)
    kl = tl.zeros([BLOCK_P], dtype=tl.float32)
    PAIRS_PER_PROMPT: tl.constexpr = K * (K - 1) // 2
    averaged_pairs = averaged_prompts * PAIRS_PER_PROMPT

    responses = tl.arange(0, BLOCK_K)
    first = 0
    while first < P:
        prompt = first + tl.arange(0, BLOCK_P)
        valid = prompt < P
        for k in range(K):
            begin, end = sequence_bounds(cu_seqlens_ptr + prompt * K + k, valid)
            tl.store(sums_ptr + prompt * K + k, sequence_sums(logprobs_ptr, begin, end, BLOCK_P, BLOCK_T), mask=valid)
        # What one thread has stored, others load.
        tl.debug_barrier()

        is_response = valid[:, None] & (responses < K)[None, :]
        place = prompt[:, None] * K + responses[None, :]
        logprob = tl.load(sums_ptr + place, mask=is_response, other=0.0)
        old = tl.load(old_logprobs_ptr + place, mask=is_response, other=0.0)
        ref = tl.load(ref_logprobs_ptr + place, mask=is_response, other=0.0)
        reward = tl.load(rewards_ptr + place, mask=is_response, other=0.0)
        log_ratio = logprob - old
        ratio = tl.exp(clip(log_ratio, -LIMIT, LIMIT))

        is_pair = (responses[:, None] < responses[None, :]) & (responses < K)[None, :]
        is_pair = valid[:, None, None] & is_pair[None, :, :]
        # u: how much more than the reference the policy prefers y1 to y2. q: the advantage difference.
        u = pair_differences(logprob - ref)
        u_old = pair_differences(old - ref)
        q = pair_differences(reward) - kl_coef * (u if KL_REWARD == "current" else u_old)

        if CLIPPING == "separate":
            loss, slope_1, slope_2, is_outside = separate_terms(q, log_ratio, ratio, clip_range, ratio_cap)
            # Their share of all responses is asked for, and the sum will be divided by the number of pairs.
            outside += tl.sum(tl.where(is_response & is_outside, PAIRS_PER_PROMPT / K, 0.0), axis=1)
        else:
            u_clipped = clip(u, u_old - clip_range, u_old + clip_range)
            loss, slope_1 = joint_terms(q, u, u_clipped, log_ratio, ratio_cap, CLIPPING)
            slope_2 = -slope_1
            if CLIPPING != "token":
                is_outside = tl.where(is_pair & (u_clipped != u), 1.0, 0.0)
                outside += tl.sum(tl.sum(is_outside, axis=2), axis=1)

        if CLIPPING == "token":
            weight = tl.where(is_pair, slope_1, 0.0)
            positive_weight = sums_over_pairs(larger(weight, 0.0), larger(-weight, 0.0))
            negative_weight = -sums_over_pairs(larger(-weight, 0.0), larger(weight, 0.0))
            tl.store(positive_weights_ptr + place, positive_weight, mask=is_response)
            tl.store(negative_weights_ptr + place, negative_weight, mask=is_response)
        else:
            coefficient_1 = tl.where(is_pair, slope_1 / (2 * averaged_pairs), 0.0)
            coefficient_2 = tl.where(is_pair, slope_2 / (2 * averaged_pairs), 0.0)
            coefficient = sums_over_pairs(coefficient_1, coefficient_2)
            tl.store(response_coefficients_ptr + place, coefficient, mask=is_response)
            losses += tl.sum(tl.sum(tl.where(is_pair, loss, 0.0), axis=2), axis=1)
        tl.debug_barrier()

        tokens_with_gradient = tl.zeros([BLOCK_P], dtype=tl.float32)
        for k in range(K):
            begin, end = sequence_bounds(cu_seqlens_ptr + prompt * K + k, valid)
            if CLIPPING == "token":
                token_losses, tokens_outside, with_gradient = clip_tokens(
                    logprobs_ptr,
                    old_token_logprobs_ptr,
                    coefficients_ptr,
                    tl.load(positive_weights_ptr + prompt * K + k, mask=valid, other=0.0),
                    tl.load(negative_weights_ptr + prompt * K + k, mask=valid, other=0.0),
                    begin,
                    end,
                    clip_range,
                    N * (K - 1),
                    BLOCK_P,
                    BLOCK_T,
                )
                losses += token_losses
                outside += tokens_outside
                tokens_with_gradient += with_gradient
            else:
                coefficient_k = tl.load(response_coefficients_ptr + prompt * K + k, mask=valid, other=0.0)
                store_coefficients(coefficients_ptr, coefficient_k, begin, end, BLOCK_P, BLOCK_T)
                tokens_with_gradient += tl.where(coefficient_k != 0.0, 1.0, 0.0)

        ratio = tl.where(is_response, ratio, 0.0)
        ratios += tl.sum(ratio, axis=1)
        ratio_max = larger(ratio_max, tl.reduce(ratio, 1, larger))
        advantages += tl.sum(tl.sum(tl.where(is_pair, tl.abs(q), 0.0), axis=2), axis=1)
        without_gradient += tl.where(valid & (tokens_with_gradient == 0.0), 1.0, 0.0)
        kl += tl.sum(tl.where(is_response, logprob - ref, 0.0), axis=1)
        first += BLOCK_P

    if CLIPPING == "token":
        tl.store(results_ptr + LOSS, tl.sum(losses, axis=0) / (N * (K - 1)))
        tl.store(results_ptr + CLIP_FRACTION, tl.sum(outside, axis=0) / N)
    else:
        tl.store(results_ptr + LOSS, tl.sum(losses, axis=0) / (2 * averaged_pairs))
        tl.store(results_ptr + CLIP_FRACTION, tl.sum(outside, axis=0) / averaged_pairs)
    tl.store(results_ptr + RATIO_MEAN, tl.sum(ratios, axis=0) / (averaged_prompts * K))
    tl.store(results_ptr + RATIO_MAX, tl.reduce(ratio_max, 0, larger))
    tl.store(results_ptr + ADVANTAGE_MEAN_ABS, tl.sum(advantages, axis=0) / averaged_pairs)
    tl.store(results_ptr + ZERO_GRADIENT_FRACTION, tl.sum(without_gradient, axis=0) / averaged_prompts)
    tl.store(results_ptr + KL, tl.sum(kl, axis=0) / (averaged_prompts * K))


def launch_pairs(token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings) -> tuple[Tensor, Tensor]:
    """RESULTS [7], and dL/d log π of each token of the pairs [N]; one launch."""
    N, (P, K) = len(token_logprobs), pairs.rewards.shape
    scratch = torch.empty(4, P, K, dtype=torch.float32, device=token_logprobs.device)
    sums, response_coefficients, positive_weights, negative_weights = scratch
    coefficients = torch.empty_like(token_logprobs)
    results = torch.empty(len(RESULTS), dtype=torch.float32, device=token_logprobs.device)
    old_token_logprobs = token_logprobs if pairs.old_token_logprobs is None else pairs.old_token_logprobs
    with torch.cuda.device_of(token_logprobs):
        pair_kernel[(1,)](
            token_logprobs,
            pairs.cu_seqlens.contiguous(),
            pairs.old_logprobs.float().contiguous(),
            pairs.ref_logprobs.float().contiguous(),
            pairs.rewards.float().contiguous(),
            old_token_logprobs.float().contiguous(),
            sums,
            response_coefficients,
            positive_weights,
            negative_weights,
            coefficients,
            results,
            P,
            N,
            pairs.averaged_prompts,
            settings.clip_range,
            settings.ratio_cap,
            settings.kl_coef,
            CLIPPING=settings.clipping,
            KL_REWARD=settings.kl_reward,
            K=K,
            **block_sizes(K),
            num_warps=WARPS,
        )
    return results, coefficients
