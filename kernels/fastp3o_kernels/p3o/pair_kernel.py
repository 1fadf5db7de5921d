"""Token log-probs of pairs -> sequence sums, ratios, clipped loss, metrics and the gradient of every token.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p. K is 2 in the paper, where a
prompt's responses are one pair; more give K (K − 1) / 2 pairs, which count alike. In the kernels p is a prompt of a
tile, and i < j are the responses of a pair, called 1 and 2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.p3o.output import COUNTS, METRICS, SAMPLER_METRICS
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import LOG_RATIO_LIMIT, P3OSettings
from fastp3o_kernels.rows.sequence_kernel import BLOCK_T, WARPS, sequence_bounds, sequence_sums, zero_like

# Prompts of a program. Its sums over them go to memory, one a prompt, and a second launch adds them in a fixed order:
# atomics would add in another order each time.
BLOCK_P = 2
# Pairs of a tile; a prompt with more of them in a square has a tile to itself.
LARGEST_TILE = 256
# Prompts that the second launch adds at once, two a thread, and its warps.
BLOCK_R, RESULTS_WARPS = 256, 4
# Registers a thread: a program may have all of a processor's. Left to itself, the compiler saves them for a second one
# and spills.
REGISTERS = 65536 // (32 * WARPS)

LIMIT = tl.constexpr(LOG_RATIO_LIMIT)

# The numbers that a loss and its metrics come from the kernels as.
RESULTS = ("loss", *COUNTS, *METRICS, *SAMPLER_METRICS)

# What each prompt adds to the results, and its place: losses; pairs, and responses in pairs; of these the ratios, the
# largest ratio and log π − log π_ref; how many pairs, responses or tokens are outside the clip range, and of how many;
# |q|; whether there is a gradient. Where pairs have importance weights, also these, and how many are at the cap.
TERMS = 10
LOSSES, PAIRS, RESPONSES, RATIOS, LARGEST_RATIO, KLS, OUTSIDE, CASES, ADVANTAGES, HAS_GRADIENT = (
    tl.constexpr(place) for place in range(TERMS)
)
SAMPLER_TERMS = 2
SAMPLER_RATIOS, SAMPLER_CAPPED = (tl.constexpr(place) for place in range(TERMS, TERMS + SAMPLER_TERMS))


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
def pairs_of_responses(counts, BLOCK_K: tl.constexpr):
    """Which i < j are a pair that counts, [p, i, j], from the responses that do, [p, K]."""
    responses = tl.arange(0, BLOCK_K)
    return counts[:, :, None] & counts[:, None, :] & (responses[:, None] < responses[None, :])[None, :, :]


@triton.jit
def sum_of_pairs(x):
    """[p, i, j] -> [p]."""
    return tl.sum(tl.sum(x, axis=2), axis=1)


@triton.jit
def pair_sampler_ratios(log_ratio, cap):
    """Importance weights of pairs, min(π_old/μ(y1) π_old/μ(y2), C), [p, i, j]; log π_old/μ of responses is [p, K]."""
    ratio = limited_ratio(log_ratio[:, :, None] + log_ratio[:, None, :])
    return tl.minimum(ratio, cap, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def sums_over_pairs(x_1, x_2):
    """[p, i, j], each pair's two responses -> sums over the pairs of each response, [p, K]."""
    return tl.sum(x_1, axis=2) + tl.sum(x_2, axis=1)


@triton.jit
def separate_term(signed_advantage, log_ratio, other_log_ratio, clip_range, ratio_cap):
    """P3O-V1. The loss of one response in its pairs and its slope in that response's log π, [p, i, j]."""
    ratio = limited_ratio(log_ratio)
    weight = signed_advantage * clip(limited_ratio(other_log_ratio), 1 / ratio_cap, ratio_cap)
    loss = weight * ratio
    clipped_loss = weight * clip(ratio, 1 - clip_range, 1 + clip_range)
    # A ratio at its limit is constant, and so is the loss where the clipped branch is the larger one.
    is_flat = (tl.abs(log_ratio) > LIMIT) | (clipped_loss > loss)
    return larger(loss, clipped_loss), tl.where(is_flat, 0.0, loss)


@triton.jit
def joint_terms(q, u, u_clipped, log_ratio, ratio_cap, CLIPPING: tl.constexpr):
    """P3O-V2, or without its clipped branch. The loss of each pair and its slope in u, [p, i, j]."""
    joint_ratio = limited_ratio(log_ratio[:, :, None] + log_ratio[:, None, :])
    weight = -q * clip(joint_ratio, 1 / ratio_cap, ratio_cap)
    loss, slope = weight * u, weight
    if CLIPPING == "joint":
        slope = tl.where(weight * u_clipped > weight * u, 0.0, weight)
        loss = larger(loss, weight * u_clipped)
    return loss, slope


@triton.jit
def responses_in_pairs(begin_ptr, valid_ptr, is_response, HAS_VALID: tl.constexpr):
    """Which responses take part in a pair, [p, K]: with tokens, valid, as is another one to the prompt; and their
    number, [p], which is 0 or more than 1. Both pointers are to the responses' own places.
    """
    begin = tl.load(begin_ptr, mask=is_response, other=0)
    end = tl.load(begin_ptr + 1, mask=is_response, other=0)
    counts = begin < end
    if HAS_VALID:
        counts = counts & (tl.load(valid_ptr, mask=is_response, other=0) != 0)
    number = tl.sum(tl.where(counts, 1.0, 0.0), axis=1)
    number = tl.where(number > 1.0, number, 0.0)
    return counts & (number > 0.0)[:, None], number


@triton.jit
def store_term(terms_ptr, terms_stride, place, values, prompt, P):
    tl.store(terms_ptr + place * terms_stride + prompt, values, mask=prompt < P)


@triton.jit
def store_response_terms(terms_ptr, terms_stride, log_ratio, log_ratio_to_ref, counts, number, prompt, P, clip_range):
    """Stores the terms that are sums over a prompt's responses in pairs, and returns how many of these are outside the
    clip range, [p]. Log-ratios are [p, K], and so are the flags of responses in pairs, whose number is [p].
    """
    ratio = tl.where(counts, limited_ratio(log_ratio), 0.0)
    store_term(terms_ptr, terms_stride, PAIRS, number * (number - 1.0) / 2.0, prompt, P)
    store_term(terms_ptr, terms_stride, RESPONSES, number, prompt, P)
    store_term(terms_ptr, terms_stride, RATIOS, tl.sum(ratio, axis=1), prompt, P)
    store_term(terms_ptr, terms_stride, LARGEST_RATIO, tl.reduce(ratio, 1, larger), prompt, P)
    store_term(terms_ptr, terms_stride, KLS, tl.sum(log_ratio_to_ref, axis=1), prompt, P)
    is_outside = counts & (clip(ratio, 1 - clip_range, 1 + clip_range) != ratio)
    return tl.sum(tl.where(is_outside, 1.0, 0.0), axis=1)


@triton.jit
def load_term(terms_ptr, place, prompt, P):
    return tl.load(terms_ptr + place * P + prompt, mask=prompt < P, other=0.0)


@triton.jit
def mean(total, count):
    """0 where nothing counts."""
    return total / tl.maximum(count, 1.0)


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
    mean_over,  # divides the sum over tokens
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
        # max(w logprob, w clipped): the larger of the two if w is positive, the smaller if it is negative.
        slope = tl.where(logprob > clipped, positive, tl.where(logprob < clipped, negative, positive + negative))
        coefficient = slope / mean_over
        tl.store(coefficients_ptr + tokens, coefficient, mask=mask)
        losses += positive * larger(logprob, clipped) - negative * larger(-logprob, -clipped)
        outside += tl.where(mask & (clipped != logprob), 1.0, 0.0)
        with_gradient += tl.where(mask & (coefficient != 0.0), 1.0, 0.0)
        done += BLOCK_T
    return tl.sum(losses, axis=1), tl.sum(outside, axis=1), tl.sum(with_gradient, axis=1)


@triton.jit
def store_sums(
    logprobs_ptr, cu_seqlens_ptr, sums_ptr, prompt, valid, K: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr
):
    """log π(y|x) of the responses to a tile's prompts, from the log-probs of their tokens."""
    for k in range(K):
        begin, end = sequence_bounds(cu_seqlens_ptr + prompt * K + k, valid)
        tl.store(sums_ptr + prompt * K + k, sequence_sums(logprobs_ptr, begin, end, BLOCK_P, BLOCK_T), mask=valid)


@triton.jit
def pair_terms(
    logprob,
    old,
    ref,
    reward,
    is_pair,
    sampler_ratio,  # [p, i, j], where HAS_SAMPLER
    clip_range,
    ratio_cap,
    kl_coef,
    CLIPPING: tl.constexpr,
    KL_REWARD: tl.constexpr,
    HAS_SAMPLER: tl.constexpr,
):
    """From [p, K] of the responses, and which of these are pairs, [p, i, j]: the loss of each pair and its slopes in
    log π of response 1 and 2, [p, i, j]; the sum of |q| over a prompt's pairs, and how many are outside the clip range,
    [p].
    """
    log_ratio = logprob - old
    # u: how much more than the reference the policy prefers y1 to y2. q: the advantage difference.
    u = pair_differences(logprob - ref)
    u_old = pair_differences(old - ref)
    q = pair_differences(reward) - kl_coef * (u if KL_REWARD == "current" else u_old)
    # Where it is 0 there is neither a loss nor a slope.
    q = tl.where(is_pair, q, 0.0)
    advantages = sum_of_pairs(tl.abs(q))
    if HAS_SAMPLER:
        q *= sampler_ratio
    outside = tl.zeros_like(advantages)
    if CLIPPING == "separate":
        log_ratio_1, log_ratio_2 = log_ratio[:, :, None], log_ratio[:, None, :]
        loss, slope_1 = separate_term(-q, log_ratio_1, log_ratio_2, clip_range, ratio_cap)
        loss_2, slope_2 = separate_term(q, log_ratio_2, log_ratio_1, clip_range, ratio_cap)
        loss += loss_2
    else:
        u_clipped = clip(u, u_old - clip_range, u_old + clip_range)
        loss, slope_1 = joint_terms(q, u, u_clipped, log_ratio, ratio_cap, CLIPPING)
        slope_2 = -slope_1
        if CLIPPING != "token":
            is_outside = tl.where(is_pair & (u_clipped != u), 1.0, 0.0)
            outside += sum_of_pairs(is_outside)
    return loss, slope_1, slope_2, advantages, outside


@triton.jit
def store_tokens(
    logprobs_ptr,
    cu_seqlens_ptr,
    old_token_logprobs_ptr,
    divisor_ptr,
    response_coefficients_ptr,
    positive_weights_ptr,
    negative_weights_ptr,
    coefficients_ptr,
    prompt,
    valid,
    counts,
    clip_range,
    MEAN_OVER: tl.constexpr,
    CLIPPING: tl.constexpr,
    K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Stores the coefficients of all tokens of a tile's prompts. Sums over each prompt's tokens in pairs where single
    tokens are clipped, [p]: losses, tokens outside the clip range, tokens; and how many have a gradient.
    """
    responses = tl.arange(0, BLOCK_K)
    losses = tl.zeros([BLOCK_P], dtype=tl.float32)
    outside = tl.zeros([BLOCK_P], dtype=tl.float32)
    counted_tokens = tl.zeros([BLOCK_P], dtype=tl.float32)
    with_gradient = tl.zeros([BLOCK_P], dtype=tl.float32)
    for k in range(K):
        begin, end = sequence_bounds(cu_seqlens_ptr + prompt * K + k, valid)
        if CLIPPING == "token":
            token_losses, tokens_outside, coefficients_not_zero = clip_tokens(
                logprobs_ptr,
                old_token_logprobs_ptr,
                coefficients_ptr,
                tl.load(positive_weights_ptr + prompt * K + k, mask=valid, other=0.0),
                tl.load(negative_weights_ptr + prompt * K + k, mask=valid, other=0.0),
                begin,
                end,
                clip_range,
                tl.load(divisor_ptr) * MEAN_OVER,
                BLOCK_P,
                BLOCK_T,
            )
            counted = tl.sum(tl.where(counts & (responses == k)[None, :], 1.0, 0.0), axis=1) > 0.0
            losses += tl.where(counted, token_losses, 0.0)
            outside += tl.where(counted, tokens_outside, 0.0)
            counted_tokens += tl.where(counted, (end - begin).to(tl.float32), 0.0)
            with_gradient += coefficients_not_zero
        else:
            coefficient = tl.load(response_coefficients_ptr + prompt * K + k, mask=valid, other=0.0)
            store_coefficients(coefficients_ptr, coefficient, begin, end, BLOCK_P, BLOCK_T)
            with_gradient += tl.where(coefficient != 0.0, 1.0, 0.0)
    return losses, outside, counted_tokens, with_gradient


@triton.jit(do_not_specialize=["P", "terms_stride"])
def pair_kernel(
    logprobs_ptr,  # [N] fp32, of tokens
    cu_seqlens_ptr,  # [P K + 1]
    old_logprobs_ptr,  # [P, K] fp32; may be sums_ptr
    ref_logprobs_ptr,  # [P, K] fp32
    rewards_ptr,  # [P, K] fp32
    valid_ptr,  # [P, K] uint8, where HAS_VALID: whether a response may be in pairs
    old_token_logprobs_ptr,  # [N] fp32, where CLIPPING is "token"; may be logprobs_ptr
    sampler_logprobs_ptr,  # [P, K] fp32, where HAS_SAMPLER
    divisor_ptr,  # [] fp32, of the sum over prompts, or over tokens where CLIPPING is "token"
    sums_ptr,  # [P, K] fp32, scratch: log π(y|x)
    response_coefficients_ptr,  # [P, K] fp32, scratch, where CLIPPING is not "token": dL/d log π(y|x)
    positive_weights_ptr,  # [P, K] fp32, scratch, where it is: sum of a response's positive weights in its pairs
    negative_weights_ptr,  # [P, K] fp32, scratch, where it is: sum of its negative ones
    coefficients_ptr,  # [N] fp32, out: dL/d log π of each token
    terms_ptr,  # [TERMS, P] fp32, out, rows at any stride; where HAS_SAMPLER SAMPLER_TERMS more
    P,
    terms_stride,
    clip_range,
    ratio_cap,
    kl_coef,
    sampler_ratio_cap,
    CLIPPING: tl.constexpr,
    KL_REWARD: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_SAMPLER: tl.constexpr,
    K: tl.constexpr,
    MEAN_OVER: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    responses = tl.arange(0, BLOCK_K)
    prompt = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid = prompt < P
    store_sums(logprobs_ptr, cu_seqlens_ptr, sums_ptr, prompt, valid, K, BLOCK_P, BLOCK_T)
    # One thread's stores are other threads' loads.
    tl.debug_barrier()

    is_response = valid[:, None] & (responses < K)[None, :]
    place = prompt[:, None] * K + responses[None, :]
    counts, number = responses_in_pairs(cu_seqlens_ptr + place, valid_ptr + place, is_response, HAS_VALID)
    logprob = tl.load(sums_ptr + place, mask=counts, other=0.0)
    old = tl.load(old_logprobs_ptr + place, mask=counts, other=0.0)
    ref = tl.load(ref_logprobs_ptr + place, mask=counts, other=0.0)
    reward = tl.load(rewards_ptr + place, mask=counts, other=0.0)
    is_pair, sampler_ratio = pairs_of_responses(counts, BLOCK_K), 1.0
    if HAS_SAMPLER:
        sampler = tl.load(sampler_logprobs_ptr + place, mask=counts, other=0.0)
        sampler_ratio = tl.where(is_pair, pair_sampler_ratios(old - sampler, sampler_ratio_cap), 0.0)
        is_capped = is_pair & (sampler_ratio >= sampler_ratio_cap)
        store_term(terms_ptr, terms_stride, SAMPLER_RATIOS, sum_of_pairs(sampler_ratio), prompt, P)
        store_term(terms_ptr, terms_stride, SAMPLER_CAPPED, sum_of_pairs(tl.where(is_capped, 1.0, 0.0)), prompt, P)
    loss, slope_1, slope_2, advantages, pairs_outside = pair_terms(
        logprob,
        old,
        ref,
        reward,
        is_pair,
        sampler_ratio,
        clip_range,
        ratio_cap,
        kl_coef,
        CLIPPING,
        KL_REWARD,
        HAS_SAMPLER,
    )
    responses_outside = store_response_terms(
        terms_ptr, terms_stride, logprob - old, logprob - ref, counts, number, prompt, P, clip_range
    )
    if CLIPPING == "token":
        positive_weight = sums_over_pairs(larger(slope_1, 0.0), larger(slope_2, 0.0))
        negative_weight = -sums_over_pairs(larger(slope_2, 0.0), larger(slope_1, 0.0))
        tl.store(positive_weights_ptr + place, positive_weight, mask=is_response)
        tl.store(negative_weights_ptr + place, negative_weight, mask=is_response)
    else:
        coefficient = sums_over_pairs(slope_1, slope_2) / (tl.load(divisor_ptr) * MEAN_OVER)
        tl.store(response_coefficients_ptr + place, coefficient, mask=is_response)
    tl.debug_barrier()

    losses, outside, cases, tokens_with_gradient = store_tokens(
        logprobs_ptr,
        cu_seqlens_ptr,
        old_token_logprobs_ptr,
        divisor_ptr,
        response_coefficients_ptr,
        positive_weights_ptr,
        negative_weights_ptr,
        coefficients_ptr,
        prompt,
        valid,
        counts,
        clip_range,
        MEAN_OVER,
        CLIPPING,
        K,
        BLOCK_P,
        BLOCK_K,
        BLOCK_T,
    )
    if CLIPPING != "token":
        losses = sum_of_pairs(loss)
        if CLIPPING == "separate":
            outside, cases = responses_outside, number
        else:
            outside, cases = pairs_outside, number * (number - 1.0) / 2.0
    store_term(terms_ptr, terms_stride, LOSSES, losses, prompt, P)
    store_term(terms_ptr, terms_stride, OUTSIDE, outside, prompt, P)
    store_term(terms_ptr, terms_stride, CASES, cases, prompt, P)
    store_term(terms_ptr, terms_stride, ADVANTAGES, advantages, prompt, P)
    store_term(terms_ptr, terms_stride, HAS_GRADIENT, tl.where(tokens_with_gradient > 0.0, 1.0, 0.0), prompt, P)


@triton.jit(do_not_specialize=["P", "mean_over"])
def results_kernel(
    terms_ptr,  # [TERMS, P] fp32, as in `pair_kernel`
    divisor_ptr,  # [] fp32, as in `pair_kernel`
    results_ptr,  # [11] fp32, [13] where HAS_SAMPLER, out: RESULTS
    P,
    mean_over,
    HAS_SAMPLER: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    zeros = tl.zeros([BLOCK_R], dtype=tl.float32)
    losses, prompts, pairs, responses, ratios = zeros, zeros, zeros, zeros, zeros
    largest_ratio, kls, outside, cases, advantages, with_gradient = zeros, zeros, zeros, zeros, zeros, zeros
    if HAS_SAMPLER:
        sampler_ratios, capped = zeros, zeros
    first = 0
    while first < P:
        prompt = first + tl.arange(0, BLOCK_R)
        prompts_pairs = load_term(terms_ptr, PAIRS, prompt, P)
        prompts += tl.where(prompts_pairs > 0.0, 1.0, 0.0)
        pairs += prompts_pairs
        losses += load_term(terms_ptr, LOSSES, prompt, P)
        responses += load_term(terms_ptr, RESPONSES, prompt, P)
        ratios += load_term(terms_ptr, RATIOS, prompt, P)
        largest_ratio = larger(largest_ratio, load_term(terms_ptr, LARGEST_RATIO, prompt, P))
        kls += load_term(terms_ptr, KLS, prompt, P)
        outside += load_term(terms_ptr, OUTSIDE, prompt, P)
        cases += load_term(terms_ptr, CASES, prompt, P)
        advantages += load_term(terms_ptr, ADVANTAGES, prompt, P)
        with_gradient += load_term(terms_ptr, HAS_GRADIENT, prompt, P)
        if HAS_SAMPLER:
            sampler_ratios += load_term(terms_ptr, SAMPLER_RATIOS, prompt, P)
            capped += load_term(terms_ptr, SAMPLER_CAPPED, prompt, P)
        first += BLOCK_R
    all_pairs, all_responses = tl.sum(pairs, axis=0), tl.sum(responses, axis=0)
    all_prompts, all_cases = tl.sum(prompts, axis=0), tl.sum(cases, axis=0)
    without_gradient = all_prompts - tl.sum(with_gradient, axis=0)
    # In the order of RESULTS.
    tl.store(results_ptr, tl.sum(losses, axis=0) / (tl.load(divisor_ptr) * mean_over))
    tl.store(results_ptr + 1, all_pairs)
    tl.store(results_ptr + 2, all_responses)
    tl.store(results_ptr + 3, all_prompts)
    tl.store(results_ptr + 4, all_cases)
    tl.store(results_ptr + 5, mean(tl.sum(ratios, axis=0), all_responses))
    tl.store(results_ptr + 6, tl.reduce(largest_ratio, 0, larger))
    tl.store(results_ptr + 7, mean(tl.sum(outside, axis=0), all_cases))
    tl.store(results_ptr + 8, mean(tl.sum(advantages, axis=0), all_pairs))
    tl.store(results_ptr + 9, mean(without_gradient, all_prompts))
    tl.store(results_ptr + 10, mean(tl.sum(kls, axis=0), all_responses))
    if HAS_SAMPLER:
        tl.store(results_ptr + 11, mean(tl.sum(sampler_ratios, axis=0), all_pairs))
        tl.store(results_ptr + 12, mean(tl.sum(capped, axis=0), all_pairs))


def launch_pairs(token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings) -> tuple[Tensor, Tensor]:
    """RESULTS [11] or [13], and dL/d log π of each token of the pairs [N], undefined for other tokens; two launches."""
    terms = empty_terms(pairs)
    coefficients = launch_coefficients(token_logprobs, pairs, settings, terms)
    return launch_results(terms, pairs, settings), coefficients


def empty_terms(pairs: PairInputs) -> Tensor:
    """[TERMS, P] fp32, with SAMPLER_TERMS more where pairs have importance weights; not yet filled in."""
    terms = TERMS if pairs.sampler_logprobs is None else TERMS + SAMPLER_TERMS
    return torch.empty(terms, len(pairs.rewards), dtype=torch.float32, device=pairs.rewards.device)


def mean_over(K: int, settings: P3OSettings) -> int:
    """For each prompt or token that is divided by: a pair has half the weight of a mean over the prompt's."""
    return K - 1 if settings.clipping == "token" else K * (K - 1)


def launch_coefficients(token_logprobs: Tensor, pairs: PairInputs, settings: P3OSettings, terms: Tensor) -> Tensor:
    """dL/d log π of each token of the pairs [N], undefined for other tokens; one launch.

    It fills in terms [TERMS, P], which may be columns of a larger tensor: what each prompt adds to the results.
    """
    P, K = pairs.rewards.shape
    scratch = torch.empty(4, P, K, dtype=torch.float32, device=token_logprobs.device)
    sums, response_coefficients, positive_weights, negative_weights = scratch
    coefficients = torch.empty_like(token_logprobs)
    # The policy's own are those that the kernel has summed before it reads any old one.
    old_logprobs = sums if pairs.old_logprobs is None else pairs.old_logprobs
    old_token_logprobs = token_logprobs if pairs.old_token_logprobs is None else pairs.old_token_logprobs
    valid, sampler = pairs.valid_responses, pairs.sampler_logprobs
    blocks = block_sizes(K)
    with torch.cuda.device_of(token_logprobs):
        pair_kernel[(triton.cdiv(P, blocks["BLOCK_P"]),)](
            token_logprobs,
            pairs.cu_seqlens.contiguous(),
            old_logprobs.float().contiguous(),
            pairs.ref_logprobs.float().contiguous(),
            pairs.rewards.float().contiguous(),
            terms if valid is None else valid.contiguous().view(torch.uint8),
            old_token_logprobs.float().contiguous(),
            terms if sampler is None else sampler.float().contiguous(),
            pairs.divisor,
            sums,
            response_coefficients,
            positive_weights,
            negative_weights,
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
            HAS_VALID=valid is not None,
            HAS_SAMPLER=sampler is not None,
            K=K,
            MEAN_OVER=mean_over(K, settings),
            **blocks,
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
    return coefficients


def launch_results(terms: Tensor, pairs: PairInputs, settings: P3OSettings) -> Tensor:
    """What each prompt adds [TERMS, P] -> RESULTS [11], or [13] where pairs have importance weights; one launch."""
    (P, K), weighted = pairs.rewards.shape, pairs.sampler_logprobs is not None
    count = len(RESULTS) if weighted else len(RESULTS) - len(SAMPLER_METRICS)
    results = torch.empty(count, dtype=torch.float32, device=terms.device)
    with torch.cuda.device_of(terms):
        results_kernel[(1,)](
            terms,
            pairs.divisor,
            results,
            P,
            mean_over(K, settings),
            HAS_SAMPLER=weighted,
            BLOCK_R=BLOCK_R,
            num_warps=RESULTS_WARPS,
        )
    return results
