"""Token log-probs of pairs -> sequence sums, ratios, clipped loss, metrics and the gradient of
every token.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p. K is 2 in the
paper, where a prompt's responses are one pair; more give K (K − 1) / 2 pairs, which count alike. In
the kernels p is a prompt of a tile, and i < j are the responses of a pair, called 1 and 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.p3o.pairs import Pairs
from fastp3o_kernels.p3o.settings import (
    COUNTS,
    LOG_RATIO_LIMIT,
    METRICS,
    SAMPLER_METRICS,
    P3OSettings,
)
from fastp3o_kernels.rows.sequence_kernel import (
    BLOCK_T,
    WARPS,
    sequence_bounds,
    sequence_sums,
    zero_like,
)

# Prompts of a program. Its sums over them go to memory, one a prompt, and a second launch adds them
# in a fixed order: atomics would add in another order each time.
BLOCK_P = 2
# Pairs of a tile; a prompt with more of them in a square has a tile to itself.
LARGEST_TILE = 256
# Prompts that the second launch adds at once, two a thread, and its warps.
BLOCK_R, RESULTS_WARPS = 256, 4
# Registers a thread: a program may have all of a processor's. Left to itself, the compiler saves
# them for a second one and spills.
REGISTERS = 65536 // (32 * WARPS)

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)

# The numbers that a loss and its metrics come from the kernels as. What a prompt adds to them has
# the same places: its losses; its pairs, responses in pairs, whether it has any, and cases of
# clipping; sums of the responses' ratios, the largest of these, cases outside the clip range, |q|,
# whether no token has a gradient, log π − log π_ref; and where pairs have importance weights,
# these, and how many are at the cap.
RESULTS = ("loss", *COUNTS, *METRICS, *SAMPLER_METRICS)
LOSSES, PAIRS, RESPONSES, PROMPTS, CASES = (tl.constexpr(place) for place in range(5))
RATIOS, LARGEST_RATIO, OUTSIDE, ADVANTAGES, NO_GRADIENT, KLS = (
    tl.constexpr(place) for place in range(5, 11)
)
SAMPLER_RATIOS, SAMPLER_CAPPED = (tl.constexpr(place) for place in range(11, 13))


def block_sizes(K: int) -> dict[str, int]:
    block_k = triton.next_power_of_2(K)
    tile = max(1, min(BLOCK_P, LARGEST_TILE // block_k**2))
    return {"BLOCK_P": tile, "BLOCK_K": block_k, "BLOCK_T": BLOCK_T}


@triton.jit
def clip(x, low, high):
    return tl.clamp(x, low, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def limited_ratio(log_ratio):
    return tl.exp(clip(log_ratio, -LIMIT, LIMIT))


@triton.jit
def pair_differences(x):
    """[p, K] -> x1 − x2 of all pairs, [p, i, j]."""
    return x[:, :, None] - x[:, None, :]


@triton.jit
def sum_of_pairs(x):
    """[p, i, j] -> [p]."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def sums_over_pairs(x_1, x_2):
    """[p, i, j], each pair's two responses -> sums over the pairs of each response, [p, K]."""
    return tl.sum(x_1, axis=2) + tl.sum(x_2, axis=1)


@triton.jit
def separate_term(signed_advantage, log_ratio, other_log_ratio, clip_range, ratio_cap):
    """P3O-V1. The loss of one response in its pairs and its slope in that response's log π, [p, i,
    j].
    """
    ratio = limited_ratio(log_ratio)
    weight = signed_advantage * clip(limited_ratio(other_log_ratio), 1 / ratio_cap, ratio_cap)
    loss = weight * ratio
    clipped_loss = weight * clip(ratio, 1 - clip_range, 1 + clip_range)
    # A ratio at its limit is constant, and so is the loss where the clipped branch is the larger
    # one.
    is_flat = (tl.abs(log_ratio) > LIMIT) | (clipped_loss > loss)
    return larger(loss, clipped_loss), tl.where(is_flat, 0.0, loss)


@triton.jit
def pair_losses(q, u, u_clipped, log_ratio, clip_range, ratio_cap, CLIPPING: tl.constexpr):
    """The loss of each pair and its slopes in log π of response 1 and 2, from q, u and clipped u,
    [p, i, j], and the log-ratios of responses, [p, K].
    """
    log_ratio_1, log_ratio_2 = log_ratio[:, :, None], log_ratio[:, None, :]
    if CLIPPING == "separate":
        loss_1, slope_1 = separate_term(-q, log_ratio_1, log_ratio_2, clip_range, ratio_cap)
        loss_2, slope_2 = separate_term(q, log_ratio_2, log_ratio_1, clip_range, ratio_cap)
        return loss_1 + loss_2, slope_1, slope_2
    # P3O-V2, or without its clipped branch.
    weight = -q * clip(limited_ratio(log_ratio_1 + log_ratio_2), 1 / ratio_cap, ratio_cap)
    loss, slope = weight * u, weight
    if CLIPPING == "joint":
        slope = tl.where(weight * u_clipped > loss, 0.0, weight)
        loss = larger(loss, weight * u_clipped)
    return loss, slope, -slope


# Slices of tokens and prompts begin at any address, and Triton would compile a variant for each
# alignment of a pointer.
@triton.jit(do_not_specialize=["P", "terms_stride"], do_not_specialize_on_alignment=range(14))
def pair_kernel(
    logprobs_ptr,  # [N] fp32, of tokens
    cu_seqlens_ptr,  # [P K + 1]
    old_logprobs_ptr,  # [P, K] fp32; may be sums_ptr
    ref_logprobs_ptr,  # [P, K] fp32
    rewards_ptr,  # [P, K] fp32; where OF_PAIRS [P, K, K]: differences, of which i < j is read
    valid_ptr,  # [P, K] uint8: whether a response may be in pairs; None: all may
    old_token_logprobs_ptr,  # [N] fp32, where CLIPPING is "token"; may be logprobs_ptr
    sampler_logprobs_ptr,  # [P, K] fp32; None: pairs have no importance weights
    divisor_ptr,  # [] fp32, of the sum over prompts, or over tokens where CLIPPING is "token"
    sums_ptr,  # [P, K] fp32, scratch: log π(y|x)
    response_slopes_ptr,  # [P, K] fp32, scratch: dL/d log π(y|x); for "token" the sum of its pairs' positive slopes
    negative_slopes_ptr,  # [P, K] fp32, scratch, where CLIPPING is "token": the sum of the negative ones
    coefficients_ptr,  # [N] fp32, out: dL/d log π of each token
    terms_ptr,  # [11, P] fp32, [13, P] with importance weights, out, rows at any stride: in the places of RESULTS
    P,
    terms_stride,
    clip_range,
    ratio_cap,
    kl_coef,
    sampler_ratio_cap,
    CLIPPING: tl.constexpr,
    KL_REWARD: tl.constexpr,
    OF_PAIRS: tl.constexpr,
    K: tl.constexpr,
    MEAN_OVER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    responses = tl.arange(0, BLOCK_K)
    prompt = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid = prompt < P
    terms_ptr += prompt
    for k in range(K):
        begin, end = sequence_bounds(cu_seqlens_ptr + prompt * K + k, valid)
        tl.store(
            sums_ptr + prompt * K + k,
            sequence_sums(logprobs_ptr, begin, end, BLOCK_P, BLOCK_T),
            mask=valid,
        )
    # One thread's stores are other threads' loads.
    tl.debug_barrier()

    # Responses in pairs: with tokens, valid, as is another one to the prompt. Their number is 0 or
    # more than 1.
    is_response = valid[:, None] & (responses < K)[None, :]
    place = prompt[:, None] * K + responses[None, :]
    begins = tl.load(cu_seqlens_ptr + place, mask=is_response, other=0)
    counts = begins < tl.load(cu_seqlens_ptr + place + 1, mask=is_response, other=0)
    if valid_ptr is not None:
        counts = counts & (tl.load(valid_ptr + place, mask=is_response, other=0) != 0)
    number = tl.sum(tl.where(counts, 1.0, 0.0), axis=1)
    number = tl.where(number > 1.0, number, 0.0)
    counts = counts & (number > 0.0)[:, None]
    is_pair = (
        counts[:, :, None]
        & counts[:, None, :]
        & (responses[:, None] < responses[None, :])[None, :, :]
    )
    pairs = number * (number - 1.0) / 2.0
    tl.store(terms_ptr + PAIRS * terms_stride, pairs, mask=valid)
    tl.store(terms_ptr + RESPONSES * terms_stride, number, mask=valid)
    tl.store(terms_ptr + PROMPTS * terms_stride, tl.where(number > 0.0, 1.0, 0.0), mask=valid)

    logprob = tl.load(sums_ptr + place, mask=counts, other=0.0)
    old = tl.load(old_logprobs_ptr + place, mask=counts, other=0.0)
    ref = tl.load(ref_logprobs_ptr + place, mask=counts, other=0.0)
    log_ratio = logprob - old
    # u: how much more than the reference the policy prefers y1 to y2. q: the advantage difference.
    u = pair_differences(logprob - ref)
    u_old = pair_differences(old - ref)
    if OF_PAIRS:
        reward_difference = tl.load(
            rewards_ptr + place[:, :, None] * K + responses[None, None, :], mask=is_pair, other=0.0
        )
    else:
        reward_difference = pair_differences(tl.load(rewards_ptr + place, mask=counts, other=0.0))
    q = reward_difference - kl_coef * (u if KL_REWARD == "current" else u_old)
    # Where it is 0 there is neither a loss nor a slope.
    q = tl.where(is_pair, q, 0.0)
    tl.store(terms_ptr + ADVANTAGES * terms_stride, sum_of_pairs(tl.abs(q)), mask=valid)
    if sampler_logprobs_ptr is not None:
        # Importance weights of pairs: min(π_old/μ(y1) π_old/μ(y2), C).
        sampler = old - tl.load(sampler_logprobs_ptr + place, mask=counts, other=0.0)
        weight = limited_ratio(sampler[:, :, None] + sampler[:, None, :])
        weight = tl.where(
            is_pair, tl.minimum(weight, sampler_ratio_cap, propagate_nan=tl.PropagateNan.ALL), 0.0
        )
        q *= weight
        capped = sum_of_pairs(tl.where(is_pair & (weight >= sampler_ratio_cap), 1.0, 0.0))
        tl.store(terms_ptr + SAMPLER_RATIOS * terms_stride, sum_of_pairs(weight), mask=valid)
        tl.store(terms_ptr + SAMPLER_CAPPED * terms_stride, capped, mask=valid)
    u_clipped = clip(u, u_old - clip_range, u_old + clip_range)
    loss, slope_1, slope_2 = pair_losses(
        q, u, u_clipped, log_ratio, clip_range, ratio_cap, CLIPPING
    )
    ratio = tl.where(counts, limited_ratio(log_ratio), 0.0)
    tl.store(terms_ptr + RATIOS * terms_stride, tl.sum(ratio, axis=1), mask=valid)
    tl.store(terms_ptr + LARGEST_RATIO * terms_stride, tl.reduce(ratio, 1, larger), mask=valid)
    tl.store(terms_ptr + KLS * terms_stride, tl.sum(logprob - ref, axis=1), mask=valid)
    divisor = tl.load(divisor_ptr) * MEAN_OVER
    if CLIPPING == "token":
        response_slope = sums_over_pairs(larger(slope_1, 0.0), larger(slope_2, 0.0))
        negative_slope = -sums_over_pairs(larger(slope_2, 0.0), larger(slope_1, 0.0))
        tl.store(negative_slopes_ptr + place, negative_slope, mask=is_response)
    else:
        response_slope = sums_over_pairs(slope_1, slope_2) / divisor
        with_gradient = tl.sum(tl.where(response_slope != 0.0, 1.0, 0.0), axis=1)
    tl.store(response_slopes_ptr + place, response_slope, mask=is_response)
    tl.debug_barrier()

    # The coefficient of every token.
    if CLIPPING == "token":
        token_losses = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
        tokens_outside = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
        tokens_with_gradient = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
        cases = tl.zeros([BLOCK_P], dtype=tl.float32)
    for k in range(K):
        begin, end = sequence_bounds(cu_seqlens_ptr + prompt * K + k, valid)
        slope = tl.load(response_slopes_ptr + prompt * K + k, mask=valid, other=0.0)[:, None]
        if CLIPPING == "token":
            negative = tl.load(negative_slopes_ptr + prompt * K + k, mask=valid, other=0.0)[:, None]
            counted = tl.sum(tl.where(counts & (responses == k)[None, :], 1.0, 0.0), axis=1) > 0.0
            cases += tl.where(counted, (end - begin).to(tl.float32), 0.0)
        longest = tl.max(end - begin, axis=0)
        done = zero_like(longest)
        while done < longest:
            tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
            mask = tokens < end[:, None]
            if CLIPPING == "token":
                known = mask & counted[:, None]
                token = tl.load(logprobs_ptr + tokens, mask=known, other=0.0)
                old_token = tl.load(old_token_logprobs_ptr + tokens, mask=known, other=0.0)
                clipped = clip(token, old_token - clip_range, old_token + clip_range)
                # max(w logprob, w clipped): the larger of the two if w is positive, the smaller if
                # it is negative.
                coefficient = tl.where(
                    token > clipped, slope, tl.where(token < clipped, negative, slope + negative)
                )
                coefficient /= divisor
                token_losses += slope * larger(token, clipped) - negative * larger(-token, -clipped)
                tokens_outside += tl.where(known & (clipped != token), 1.0, 0.0)
                tokens_with_gradient += tl.where(known & (coefficient != 0.0), 1.0, 0.0)
            else:
                coefficient = tl.broadcast_to(slope, [BLOCK_P, BLOCK_T])
            tl.store(coefficients_ptr + tokens, coefficient, mask=mask)
            done += BLOCK_T
    if CLIPPING == "token":
        losses, outside = tl.sum(token_losses, axis=1), tl.sum(tokens_outside, axis=1)
        with_gradient = tl.sum(tokens_with_gradient, axis=1)
    elif CLIPPING == "separate":
        is_outside = counts & (clip(ratio, 1 - clip_range, 1 + clip_range) != ratio)
        losses, cases, outside = (
            sum_of_pairs(loss),
            number,
            tl.sum(tl.where(is_outside, 1.0, 0.0), axis=1),
        )
    else:
        is_outside = is_pair & (u_clipped != u)
        losses, cases, outside = (
            sum_of_pairs(loss),
            pairs,
            sum_of_pairs(tl.where(is_outside, 1.0, 0.0)),
        )
    no_gradient = (number > 0.0) & (with_gradient == 0.0)
    tl.store(terms_ptr + LOSSES * terms_stride, losses, mask=valid)
    tl.store(terms_ptr + CASES * terms_stride, cases, mask=valid)
    tl.store(terms_ptr + OUTSIDE * terms_stride, outside, mask=valid)
    tl.store(terms_ptr + NO_GRADIENT * terms_stride, tl.where(no_gradient, 1.0, 0.0), mask=valid)


@triton.jit(do_not_specialize=["P", "mean_over"])
def results_kernel(
    terms_ptr,  # [11, P] fp32, or [13, P], as in `pair_kernel`
    divisor_ptr,  # [] fp32, as in `pair_kernel`
    results_ptr,  # [11] fp32, or [13], out: RESULTS, one a program
    P,
    mean_over,
    BLOCK_R: tl.constexpr,
):
    place = tl.program_id(0)
    # What a mean is over, as METRICS and SAMPLER_METRICS say.
    over = tl.where((place == RATIOS) | (place == KLS), RESPONSES, PAIRS)
    over = tl.where(place == OUTSIDE, CASES, tl.where(place == NO_GRADIENT, PROMPTS, over))
    sums = tl.zeros([BLOCK_R], dtype=tl.float32)
    largest = tl.zeros([BLOCK_R], dtype=tl.float32)
    counts = tl.zeros([BLOCK_R], dtype=tl.float32)
    first = 0
    while first < P:
        prompt = first + tl.arange(0, BLOCK_R)
        terms = tl.load(terms_ptr + place * P + prompt, mask=prompt < P, other=0.0)
        sums += terms
        largest = larger(largest, terms)
        counts += tl.load(terms_ptr + over * P + prompt, mask=prompt < P, other=0.0)
        first += BLOCK_R
    result = tl.sum(sums, axis=0)
    if place == LOSSES:
        result /= tl.load(divisor_ptr) * mean_over
    elif place == LARGEST_RATIO:
        result = tl.reduce(largest, 0, larger)
    elif place > CASES:
        result /= tl.maximum(tl.sum(counts, axis=0), 1.0)  # 0 where nothing counts
    tl.store(results_ptr + place, result)


def empty_terms(pairs: Pairs) -> Tensor:
    """[11, P] fp32, or [13, P] where pairs have importance weights; not yet filled in."""
    count = len(RESULTS) - (len(SAMPLER_METRICS) if pairs.sampler_logprobs is None else 0)
    return torch.empty(count, len(pairs.rewards), dtype=torch.float32, device=pairs.rewards.device)


def mean_over(K: int, settings: P3OSettings) -> int:
    """For each prompt or token that is divided by: a pair has half the weight of a mean over the
    prompt's.
    """
    return K - 1 if settings.clipping == "token" else K * (K - 1)


def launch_coefficients(
    token_logprobs: Tensor, pairs: Pairs, settings: P3OSettings, terms: Tensor
) -> Tensor:
    """dL/d log π of each token of the pairs [N], undefined for other tokens; one launch.

    It fills in what each prompt adds to the results, terms of `empty_terms`, which may be columns
    of a larger tensor.
    """
    P, K = pairs.rewards.shape[:2]
    sums, response_slopes, negative_slopes = torch.empty(
        3, P, K, dtype=torch.float32, device=token_logprobs.device
    )
    coefficients = torch.empty_like(token_logprobs)
    # The policy's own are those that the kernel has summed before it reads any old one.
    old_logprobs = sums if pairs.old_logprobs is None else pairs.old_logprobs
    old_token_logprobs = (
        token_logprobs if pairs.old_token_logprobs is None else pairs.old_token_logprobs
    )
    valid, sampler = pairs.valid_responses, pairs.sampler_logprobs
    blocks = block_sizes(K)
    with torch.cuda.device_of(token_logprobs):
        pair_kernel[(triton.cdiv(P, blocks["BLOCK_P"]),)](
            token_logprobs,
            pairs.cu_seqlens.contiguous(),
            old_logprobs.float().contiguous(),
            pairs.ref_logprobs.float().contiguous(),
            pairs.rewards.float().contiguous(),
            None if valid is None else valid.contiguous().view(torch.uint8),
            old_token_logprobs.float().contiguous(),
            None if sampler is None else sampler.float().contiguous(),
            pairs.divisor,
            sums,
            response_slopes,
            negative_slopes,
            coefficients,
            terms,
            P,
            terms.stride(0),
            settings.clip_range,
            settings.ratio_cap,
            settings.kl_coef,
            settings.sampler_ratio_cap,
            CLIPPING=settings.clipping,
            KL_REWARD=settings.kl_reward,
            OF_PAIRS=pairs.compares_pairs,
            K=K,
            MEAN_OVER=mean_over(K, settings),
            **blocks,
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
    return coefficients


def launch_results(terms: Tensor, pairs: Pairs, settings: P3OSettings) -> Tensor:
    """What each prompt adds, terms of `empty_terms` -> RESULTS, as many; one launch."""
    P, K = pairs.rewards.shape[:2]
    results = torch.empty(len(terms), dtype=torch.float32, device=terms.device)
    with torch.cuda.device_of(terms):
        results_kernel[(len(terms),)](
            terms,
            pairs.divisor,
            results,
            P,
            mean_over(K, settings),
            BLOCK_R=BLOCK_R,
            num_warps=RESULTS_WARPS,
        )
    return results
