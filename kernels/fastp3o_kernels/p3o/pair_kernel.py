"""Token log-probs of pairs -> sequence sums, ratios, clipped loss, metrics and the gradient of every token.

N tokens, P prompts with K responses each: sequence K p + k is response k of prompt p. K is 2 in the paper, where a
prompt's responses are one pair; more give K (K − 1) / 2 pairs, which count alike.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.checks import (
    check_cu_seqlens,
    check_floating,
    check_objective,
    check_old_token_logprobs,
    check_pairs,
    check_responses,
    check_same_device,
    check_shape,
)
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.objective import LOG_RATIO_LIMIT, METRICS, Objective, P3OLossOutput

# One program does all prompts, a tile of them at a time: a mean over programs would need atomics, whose order varies,
# or a second launch. Tokens number at most a million or so (4 MB), little for one processor beside the head's products.
BLOCK_P = 2
BLOCK_T = 256
WARPS = 16
# Of a tile; a prompt with more pairs than that in a square has a tile to itself.
LARGEST_TILE = 256


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
def sequence_sums(values_ptr, begin, end, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr):
    sums = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    longest = tl.max(end - begin, axis=0)
    done = longest * 0
    while done < longest:
        tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
        sums += tl.load(values_ptr + tokens, mask=tokens < end[:, None], other=0.0)
        done += BLOCK_T
    return tl.sum(sums, axis=1)


@triton.jit(do_not_specialize=["S"])
def sequence_sums_kernel(
    values_ptr,  # [N] fp32
    cu_seqlens_ptr,  # [S + 1]
    sums_ptr,  # [S] fp32, out
    S,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    sequence = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid = sequence < S
    begin = tl.load(cu_seqlens_ptr + sequence, mask=valid, other=0).to(tl.int64)
    end = tl.load(cu_seqlens_ptr + sequence + 1, mask=valid, other=0).to(tl.int64)
    tl.store(sums_ptr + sequence, sequence_sums(values_ptr, begin, end, BLOCK_P, BLOCK_T), mask=valid)


@triton.jit
def store_coefficients(coefficients_ptr, coefficient, begin, end, BLOCK_P: tl.constexpr, BLOCK_T: tl.constexpr):
    longest = tl.max(end - begin, axis=0)
    done = longest * 0
    while done < longest:
        tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
        of_tokens = tl.broadcast_to(coefficient[:, None], [BLOCK_P, BLOCK_T])
        tl.store(coefficients_ptr + tokens, of_tokens, mask=tokens < end[:, None])
        done += BLOCK_T


@triton.jit
def clip_tokens(
    logprobs_ptr,
    old_ptr,
    coefficients_ptr,
    plus,  # sums of the positive and of the negative weights of a response in its pairs
    minus,
    begin,
    end,
    clip_range,
    averaged,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    losses = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    outside = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    with_gradient = tl.zeros([BLOCK_P, BLOCK_T], dtype=tl.float32)
    plus, minus = plus[:, None], minus[:, None]
    longest = tl.max(end - begin, axis=0)
    done = longest * 0
    while done < longest:
        tokens = begin[:, None] + done + tl.arange(0, BLOCK_T)[None, :]
        mask = tokens < end[:, None]
        logprob = tl.load(logprobs_ptr + tokens, mask=mask, other=0.0)
        old = tl.load(old_ptr + tokens, mask=mask, other=0.0)
        clipped = clip(logprob, old - clip_range, old + clip_range)
        # max(w logprob, w clipped): the larger of the two where w is positive, the smaller where it is negative.
        coefficient = tl.where(logprob > clipped, plus, tl.where(logprob < clipped, minus, plus + minus)) / averaged
        tl.store(coefficients_ptr + tokens, coefficient, mask=mask)
        losses += plus * larger(logprob, clipped) - minus * larger(-logprob, -clipped)
        outside += tl.where(mask & (clipped != logprob), 1.0, 0.0)
        with_gradient += tl.where(mask & (coefficient != 0.0), 1.0, 0.0)
        done += BLOCK_T
    return tl.sum(losses, axis=1), tl.sum(outside, axis=1), tl.sum(with_gradient, axis=1)


@triton.jit
def of_responses(of_first, of_second):
    """[prompts, i, j] of a pair's two responses -> the sum over the pairs of each response, [prompts, K]."""
    return tl.sum(of_first, axis=2) + tl.sum(of_second, axis=1)


@triton.jit(do_not_specialize=["P", "N", "PROMPTS"])
def pair_kernel(
    logprobs_ptr,  # [N] fp32, of tokens
    cu_seqlens_ptr,  # [P K + 1]
    old_logprobs_ptr,  # [P, K] fp32
    ref_logprobs_ptr,  # [P, K] fp32
    rewards_ptr,  # [P, K] fp32
    old_token_logprobs_ptr,  # [N] fp32, where CLIPPING is "token"
    sums_ptr,  # [P, K] fp32, out: log π(y|x)
    plus_ptr,  # [P, K] fp32, out: dL/d log π(y|x); where CLIPPING is "token" the sum of its positive weights
    minus_ptr,  # [P, K] fp32, out, where CLIPPING is "token": the sum of its negative weights
    coefficients_ptr,  # [N] fp32, out: dL/d log π of each token
    results_ptr,  # [7] fp32, out: loss and metrics
    P,
    N,  # tokens that the loss averages over where CLIPPING is "token"
    PROMPTS,  # prompts that it averages over elsewhere: P, or more where this launch sees a part of them
    clip_range,
    ratio_cap,
    kl_coef,
    CLIPPING: tl.constexpr,
    KL_REWARD: tl.constexpr,
    LIMIT: tl.constexpr,
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
    OF_PROMPT: tl.constexpr = K * (K - 1) // 2
    pairs_averaged = PROMPTS * OF_PROMPT

    responses = tl.arange(0, BLOCK_K)
    first = P * 0
    while first < P:
        prompt = first + tl.arange(0, BLOCK_P)
        valid = prompt < P
        for k in range(K):
            begin = tl.load(cu_seqlens_ptr + prompt * K + k, mask=valid, other=0).to(tl.int64)
            end = tl.load(cu_seqlens_ptr + prompt * K + k + 1, mask=valid, other=0).to(tl.int64)
            tl.store(sums_ptr + prompt * K + k, sequence_sums(logprobs_ptr, begin, end, BLOCK_P, BLOCK_T), mask=valid)
        # What one thread has stored, others load.
        tl.debug_barrier()

        of_prompt = valid[:, None] & (responses < K)[None, :]
        here = prompt[:, None] * K + responses[None, :]
        logprob = tl.load(sums_ptr + here, mask=of_prompt, other=0.0)
        old = tl.load(old_logprobs_ptr + here, mask=of_prompt, other=0.0)
        ref = tl.load(ref_logprobs_ptr + here, mask=of_prompt, other=0.0)
        reward = tl.load(rewards_ptr + here, mask=of_prompt, other=0.0)
        ratio = tl.exp(clip(logprob - old, -LIMIT, LIMIT))

        # All pairs of responses i < j to a prompt, [BLOCK_P, i, j].
        is_pair = (responses[:, None] < responses[None, :]) & (responses < K)[None, :]
        is_pair = valid[:, None, None] & is_pair[None, :, :]
        logprob_1, logprob_2 = logprob[:, :, None], logprob[:, None, :]
        old_1, old_2 = old[:, :, None], old[:, None, :]
        ref_1, ref_2 = ref[:, :, None], ref[:, None, :]
        ratio_1, ratio_2 = ratio[:, :, None], ratio[:, None, :]
        # u: how much more than the reference the policy prefers y1 to y2. q: the advantage difference.
        u = (logprob_1 - ref_1) - (logprob_2 - ref_2)
        u_old = (old_1 - ref_1) - (old_2 - ref_2)
        q = (reward[:, :, None] - reward[:, None, :]) - kl_coef * (u if KL_REWARD == "current" else u_old)
        u_clipped = clip(u, u_old - clip_range, u_old + clip_range)

        if CLIPPING == "separate":
            weight_1 = -q * clip(ratio_2, 1 / ratio_cap, ratio_cap)
            weight_2 = q * clip(ratio_1, 1 / ratio_cap, ratio_cap)
            clipped = clip(ratio, 1 - clip_range, 1 + clip_range)
            clipped_1, clipped_2 = clipped[:, :, None], clipped[:, None, :]
            loss = larger(weight_1 * ratio_1, weight_1 * clipped_1) + larger(weight_2 * ratio_2, weight_2 * clipped_2)
            # Where the ratio is limited it is constant.
            moves_1 = (tl.abs(logprob_1 - old_1) > LIMIT) | (weight_1 * clipped_1 > weight_1 * ratio_1)
            moves_2 = (tl.abs(logprob_2 - old_2) > LIMIT) | (weight_2 * clipped_2 > weight_2 * ratio_2)
            coefficient_1 = tl.where(moves_1, 0.0, weight_1 * ratio_1 / (2 * pairs_averaged))
            coefficient_2 = tl.where(moves_2, 0.0, weight_2 * ratio_2 / (2 * pairs_averaged))
            outside += tl.sum(tl.where(of_prompt & (clipped != ratio), OF_PROMPT / K, 0.0), axis=1)
        else:
            joint_ratio = tl.exp(clip((logprob_1 - old_1) + (logprob_2 - old_2), -LIMIT, LIMIT))
            weight = -q * clip(joint_ratio, 1 / ratio_cap, ratio_cap)
            loss = weight * u
            coefficient_1 = weight / (2 * pairs_averaged)
            if CLIPPING == "joint":
                coefficient_1 = tl.where(weight * u_clipped > weight * u, 0.0, coefficient_1)
                loss = larger(loss, weight * u_clipped)
            coefficient_2 = -coefficient_1
            if CLIPPING != "token":
                out = tl.where(is_pair & (u_clipped != u), 1.0, 0.0)
                outside += tl.sum(tl.sum(out, axis=2), axis=1)

        if CLIPPING == "token":
            weight = tl.where(is_pair, weight, 0.0)
            plus = of_responses(larger(weight, 0.0), larger(-weight, 0.0))
            minus = -of_responses(larger(-weight, 0.0), larger(weight, 0.0))
            tl.store(plus_ptr + here, plus, mask=of_prompt)
            tl.store(minus_ptr + here, minus, mask=of_prompt)
        else:
            coefficient_1 = tl.where(is_pair, coefficient_1, 0.0)
            coefficient_2 = tl.where(is_pair, coefficient_2, 0.0)
            tl.store(plus_ptr + here, of_responses(coefficient_1, coefficient_2), mask=of_prompt)
            losses += tl.sum(tl.sum(tl.where(is_pair, loss, 0.0), axis=2), axis=1)
        tl.debug_barrier()

        tokens_with_gradient = tl.zeros([BLOCK_P], dtype=tl.float32)
        for k in range(K):
            begin = tl.load(cu_seqlens_ptr + prompt * K + k, mask=valid, other=0).to(tl.int64)
            end = tl.load(cu_seqlens_ptr + prompt * K + k + 1, mask=valid, other=0).to(tl.int64)
            plus_k = tl.load(plus_ptr + prompt * K + k, mask=valid, other=0.0)
            if CLIPPING == "token":
                minus_k = tl.load(minus_ptr + prompt * K + k, mask=valid, other=0.0)
                loss_k, out_k, count_k = clip_tokens(
                    logprobs_ptr,
                    old_token_logprobs_ptr,
                    coefficients_ptr,
                    plus_k,
                    minus_k,
                    begin,
                    end,
                    clip_range,
                    N * (K - 1),
                    BLOCK_P,
                    BLOCK_T,
                )
                losses += loss_k
                outside += out_k
                tokens_with_gradient += count_k
            else:
                store_coefficients(coefficients_ptr, plus_k, begin, end, BLOCK_P, BLOCK_T)
                tokens_with_gradient += tl.where(plus_k != 0.0, 1.0, 0.0)

        ratio = tl.where(of_prompt, ratio, 0.0)
        ratios += tl.sum(ratio, axis=1)
        ratio_max = larger(ratio_max, tl.reduce(ratio, 1, larger))
        advantages += tl.sum(tl.sum(tl.where(is_pair, tl.abs(q), 0.0), axis=2), axis=1)
        without_gradient += tl.where(valid & (tokens_with_gradient == 0.0), 1.0, 0.0)
        kl += tl.sum(tl.where(of_prompt, logprob - ref, 0.0), axis=1)
        first += BLOCK_P

    # In the order of METRICS.
    if CLIPPING == "token":
        tl.store(results_ptr, tl.sum(losses, axis=0) / (N * (K - 1)))
        tl.store(results_ptr + 3, tl.sum(outside, axis=0) / N)
    else:
        tl.store(results_ptr, tl.sum(losses, axis=0) / (2 * pairs_averaged))
        tl.store(results_ptr + 3, tl.sum(outside, axis=0) / pairs_averaged)
    tl.store(results_ptr + 1, tl.sum(ratios, axis=0) / (PROMPTS * K))
    tl.store(results_ptr + 2, tl.reduce(ratio_max, 0, larger))
    tl.store(results_ptr + 4, tl.sum(advantages, axis=0) / pairs_averaged)
    tl.store(results_ptr + 5, tl.sum(without_gradient, axis=0) / PROMPTS)
    tl.store(results_ptr + 6, tl.sum(kl, axis=0) / (PROMPTS * K))


class PairInputs(NamedTuple):
    """What is known of the responses to P prompts beside the policy's log-probs, on one device."""

    cu_seqlens: Tensor  # [P K + 1], into [N]
    old_logprobs: Tensor  # [P, K]
    ref_logprobs: Tensor  # [P, K]
    rewards: Tensor  # [P, K]
    old_token_logprobs: Tensor | None  # [N], where single tokens are clipped
    averaged_prompts: int  # that the loss is a mean over: P, or more for a part of them

    @property
    def responses_per_prompt(self) -> int:
        return self.rewards.shape[1]

    def part(self, first: int, last: int) -> "PairInputs":
        """Prompts first to last - 1; offsets stay those in [N]."""
        K = self.responses_per_prompt
        return self._replace(
            cu_seqlens=self.cu_seqlens[K * first : K * last + 1],
            old_logprobs=self.old_logprobs[first:last],
            ref_logprobs=self.ref_logprobs[first:last],
            rewards=self.rewards[first:last],
        )


def launch_pairs(token_logprobs: Tensor, pairs: PairInputs, objective: Objective) -> tuple[Tensor, Tensor]:
    """Loss and metrics [7], and dL/d log π of each token of the pairs [N]; one launch."""
    N, (P, K) = len(token_logprobs), pairs.rewards.shape
    sums, plus, minus = torch.empty(3, P, K, dtype=torch.float32, device=token_logprobs.device)
    coefficients = torch.empty_like(token_logprobs)
    results = torch.empty(1 + len(METRICS), dtype=torch.float32, device=token_logprobs.device)
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
            plus,
            minus,
            coefficients,
            results,
            P,
            N,
            pairs.averaged_prompts,
            objective.clip_range,
            objective.ratio_cap,
            objective.kl_coef,
            CLIPPING=objective.clipping,
            KL_REWARD=objective.kl_reward,
            LIMIT=LOG_RATIO_LIMIT,
            K=K,
            **block_sizes(K),
            num_warps=WARPS,
        )
    return results, coefficients


def pair_loss(
    token_logprobs: Tensor, pairs: PairInputs, objective: Objective, *, triton_kernels: bool
) -> tuple[Tensor, Tensor]:
    """Loss and metrics [7], and dL/d log π of each token of the pairs [N], with either implementation."""
    if triton_kernels:
        return launch_pairs(token_logprobs, pairs, objective)
    tokens = slice(int(pairs.cu_seqlens[0]), int(pairs.cu_seqlens[-1]))
    with torch.enable_grad():
        of_pairs = token_logprobs[tokens].detach().requires_grad_()
        loss, metrics = eager.token_loss(
            of_pairs,
            pairs.cu_seqlens - tokens.start,
            None if pairs.old_token_logprobs is None else pairs.old_token_logprobs[tokens],
            pairs.old_logprobs,
            pairs.ref_logprobs,
            pairs.rewards,
            objective,
        )
        # A mean over these prompts or tokens becomes their share of the mean over all.
        shares = len(of_pairs) / len(token_logprobs), len(pairs.rewards) / pairs.averaged_prompts
        loss = loss * shares[objective.clipping != "token"]
        (gradient,) = torch.autograd.grad(loss, of_pairs)
    coefficients = torch.zeros_like(token_logprobs)
    coefficients[tokens] = gradient
    return torch.stack([loss.detach(), *(metric.to(loss.dtype) for metric in metrics.values())]), coefficients


def spread(logprobs: Tensor, cu_seqlens: Tensor, N: int) -> Tensor:
    """Token log-probs [N] that sum, exactly, to given ones of sequences."""
    return logprobs.new_zeros(N).index_put_((cu_seqlens[:-1].long(),), logprobs.flatten())


def output(results: Tensor, loss: Tensor) -> P3OLossOutput:
    return P3OLossOutput(loss, dict(zip(METRICS, results[1:].float().unbind(), strict=True)))


class TokenP3OLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, token_logprobs, pairs, objective):
        results, coefficients = launch_pairs(token_logprobs, pairs, objective)
        ctx.save_for_backward(coefficients)
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        (coefficients,) = ctx.saved_tensors
        return coefficients * grad_loss, None, None


class SequenceSums(torch.autograd.Function):
    """Adds in the order of the pair kernel, so that equal log-probs give a ratio of exactly 1."""

    @staticmethod
    def forward(ctx, values, cu_seqlens):
        S = len(cu_seqlens) - 1
        sums = torch.empty(S, dtype=torch.float32, device=values.device)
        with torch.cuda.device_of(values):
            sequence_sums_kernel[(triton.cdiv(S, BLOCK_P),)](
                values, cu_seqlens, sums, S, BLOCK_P=BLOCK_P, BLOCK_T=BLOCK_T, num_warps=WARPS
            )
        ctx.save_for_backward(cu_seqlens)
        ctx.tokens = len(values)
        return sums

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_sums):
        (cu_seqlens,) = ctx.saved_tensors
        return grad_sums.repeat_interleave(cu_seqlens.long().diff(), output_size=ctx.tokens), None


def sequence_logprobs(token_logprobs: Tensor, cu_seqlens: Tensor, *, impl: str | None = None) -> Tensor:
    """Log-probability of each response: the sum over its tokens, in fixed order; differentiable.

    Args:
        token_logprobs: [N] of any floating dtype.
        cu_seqlens: [S + 1] int32 or int64, where each sequence begins; 0 first, N last.
        impl: None picks by device; "triton" and "eager" force.

    Returns:
        [S] fp32 (fp64 for fp64 log-probs).

    Raises:
        ValueError: for shapes and dtypes that disagree or offsets that do not increase from 0 to N (on a GPU only with
            FASTP3O_DEBUG=1).
    """
    check_floating("token_logprobs", token_logprobs)
    check_cu_seqlens(cu_seqlens, len(token_logprobs))
    check_same_device(token_logprobs=token_logprobs, cu_seqlens=cu_seqlens)
    if use_triton(impl, token_logprobs):
        return SequenceSums.apply(token_logprobs.float().contiguous(), cu_seqlens.contiguous())
    return eager.sequence_logprobs(token_logprobs, cu_seqlens)


def token_p3o_loss(
    token_logprobs: Tensor,
    cu_seqlens: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    *,
    clipping: str = "joint",
    clip_range: float = 0.2,
    ratio_cap: float = 10.0,
    kl_coef: float = 0.05,
    kl_reward: str = "current",
    old_token_logprobs: Tensor | None = None,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the log-probabilities of tokens, for a head of one's own.

    Args:
        token_logprobs: [N] log π of every response token, the end-of-sequence included.
        cu_seqlens: [P K + 1] where each response begins.
        old_token_logprobs: [N] log π_old of the same tokens, for clipping="token" and only there.
        others: as in `p3o_loss`.

    Returns:
        P3OLossOutput; the gradient reaches token_logprobs.

    Raises:
        ValueError: as in `p3o_loss` and `sequence_logprobs`.
    """
    objective = Objective(clipping, clip_range, ratio_cap, kl_coef, kl_reward)
    check_objective(*objective)
    if token_logprobs.dim() != 1:
        raise ValueError(f"token_logprobs must have shape [N], got {list(token_logprobs.shape)}")
    check_floating("token_logprobs", token_logprobs)
    check_token_pairs(
        len(token_logprobs), cu_seqlens, old_logprobs, ref_logprobs, rewards, clipping, old_token_logprobs
    )
    given = [t for t in (token_logprobs, old_logprobs, ref_logprobs, rewards, old_token_logprobs) if t is not None]
    check_same_device(
        token_logprobs=token_logprobs,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        old_token_logprobs=old_token_logprobs,
    )
    if use_triton(impl, *given):
        pairs = PairInputs(cu_seqlens, old_logprobs, ref_logprobs, rewards, old_token_logprobs, len(rewards))
        loss, results = TokenP3OLoss.apply(token_logprobs.float().contiguous(), pairs, objective)
        return output(results, loss)
    return eager.token_loss(
        token_logprobs, cu_seqlens, old_token_logprobs, old_logprobs, ref_logprobs, rewards, objective
    )


def check_token_pairs(
    tokens: int,
    cu_seqlens: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    clipping: str,
    old_token_logprobs: Tensor | None,
    *,
    on_policy: bool = False,
) -> None:
    K = check_responses(old_logprobs)
    check_cu_seqlens(cu_seqlens, tokens, responses_per_prompt=K)
    check_pairs((len(cu_seqlens) - 1) // K, K, old_logprobs, ref_logprobs, rewards)
    # On-policy every token is where it was: none is clipped, and nothing needs to be known of it.
    if not (on_policy and old_token_logprobs is None):
        check_old_token_logprobs(clipping, old_token_logprobs, tokens)


def p3o_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    *,
    clipping: str = "joint",
    clip_range: float = 0.2,
    ratio_cap: float = 10.0,
    kl_coef: float = 0.05,
    kl_reward: str = "current",
    impl: str | None = None,
) -> P3OLossOutput:
    """Pairwise Proximal Policy Optimization (arXiv 2310.00212) from log-probabilities of the responses to P prompts.

    With q = sg((r1 − r2) − β (u of the policy in the KL)), u = log π/π_ref(y1) − log π/π_ref(y2), ρ = π/π_old:
        joint (P3O-V2): mean of max(−q c u, −q c clip(u, u_old ± ε)) / 2, c = sg(clip(ρ1 ρ2, 1/C, C));
        separate (P3O-V1): mean of [max(−q c2 ρ1, −q c2 clip(ρ1, 1 ± ε)) + max(q c1 ρ2, q c1 clip(ρ2, 1 ± ε))] / 2;
        none: the joint loss without its clipped branch.
    The mean is over all pairs of responses to the same prompt: one in the paper, K (K − 1) / 2 for K responses (beyond
    it). Adding any number to all rewards of a prompt changes nothing.

    Args:
        logprobs: [P, K] log π(y|x), differentiable; column 0 is response 1. Sums over response tokens, in nats. K is 2
            or more.
        old_logprobs: [P, K] of the policy that sampled, as this model computes them.
        ref_logprobs: [P, K] of the frozen reference.
        rewards: [P, K].
        clipping: "joint", "separate" or "none"; for "token" see `token_p3o_loss`.
        clip_range: ε. ratio_cap: C. kl_coef: β.
        kl_reward: policy in q's KL part: "current" (first author's code) or "rollout" (the paper's algorithm box).
        impl: None picks by device; "triton" and "eager" force.

    Returns:
        P3OLossOutput(loss, metrics), fp32 (fp64 for fp64 inputs).

    Raises:
        ValueError: for shapes, dtypes, devices or settings that are wrong, and for NaN in old_logprobs, ref_logprobs or
            rewards (on a GPU only with FASTP3O_DEBUG=1).
    """
    if clipping == "token":
        raise ValueError('clipping="token" clips tokens; call token_p3o_loss or logits_p3o_loss')
    if logprobs.dim() != 2 or logprobs.shape[1] < 2 or len(logprobs) == 0:
        raise ValueError(
            f"logprobs must have shape [P, K] with P of at least 1 and K of at least 2, got {list(logprobs.shape)}"
        )
    check_floating("logprobs", logprobs)
    check_shape("old_logprobs", old_logprobs, tuple(logprobs.shape), "as logprobs")
    # To the kernel a response whose sum is known is a response of one token.
    one_token_each = torch.arange(logprobs.numel() + 1, dtype=torch.int32, device=logprobs.device)
    return token_p3o_loss(
        logprobs.flatten(),
        one_token_each,
        old_logprobs,
        ref_logprobs,
        rewards,
        clipping=clipping,
        clip_range=clip_range,
        ratio_cap=ratio_cap,
        kl_coef=kl_coef,
        kl_reward=kl_reward,
        impl=impl,
    )
