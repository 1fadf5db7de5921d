"""Logits of pairs -> P3O's loss, and back to the gradient of the logits.

N tokens, V vocabulary, P pairs; sequence 2p is response 1 of pair p, sequence 2p + 1 its response 2.
"""

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_logits, check_objective, check_same_device
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.objective import Objective, P3OLossOutput
from fastp3o_kernels.pair_loss import check_token_pairs, launch_pairs, output, token_p3o_loss
from fastp3o_kernels.token_logprobs import (
    check_inplace,
    launch_dlogits,
    launch_logprobs,
    refuse_second_backward,
    token_logprobs,
    with_rows,
)

# No label is ignored here: what is not scored has no place in cu_seqlens.
NO_LABEL = -(2**31)


class LogitsP3OLoss(torch.autograd.Function):
    """Two launches forward (rows, pairs) and one backward, which skips reading rows of zero gradient."""

    @staticmethod
    def forward(
        ctx,
        logits,
        labels,
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        old_token_logprobs,
        objective,
        temperature,
        inplace_backward,
    ):
        logprobs, row_max, log_sum = launch_logprobs(logits, labels, temperature, NO_LABEL)
        results, coefficients = launch_pairs(
            logprobs, cu_seqlens, old_logprobs, ref_logprobs, rewards, old_token_logprobs, objective
        )
        ctx.save_for_backward(logits, labels, row_max, log_sum, coefficients)
        ctx.temperature = temperature
        ctx.inplace = inplace_backward
        ctx.overwritten = False
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        refuse_second_backward(ctx)
        logits, labels, row_max, log_sum, coefficients = ctx.saved_tensors
        dlogits = launch_dlogits(
            logits, labels, row_max, log_sum, coefficients, grad_loss, ctx.temperature, NO_LABEL, inplace=ctx.inplace
        )
        return dlogits, *[None] * 9


def logits_p3o_loss(
    logits: Tensor,
    labels: Tensor,
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
    temperature: float = 1.0,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the logits that predict the response tokens of P pairs.

    Args:
        logits: [N, V] of any floating dtype. P3O exponentiates sums of log-probabilities: logits rounded to bf16 move
            the log-ratio of a 128-token response by about 0.1, half a clip range. Compute them in fp32.
        labels: [N] int64 or int32, the response tokens, end-of-sequence included.
        cu_seqlens: [2P + 1] int32 or int64, where each response begins in [N].
        old_logprobs, ref_logprobs, rewards: [P, 2].
        old_token_logprobs: [N], for clipping="token" and only there: the first author's variant, which clips every
            token's log-probability at the old one ± ε and averages over tokens.
        temperature: divides the logits.
        inplace_backward: as in `token_logprobs`.
        others: as in `p3o_loss`.

    Returns:
        P3OLossOutput; the gradient reaches the logits. Rows without a gradient are not read in backward.

    Raises:
        ValueError: as in `token_logprobs`, `sequence_logprobs` and `p3o_loss`.
    """
    objective = Objective(clipping, clip_range, ratio_cap, kl_coef, kl_reward)
    check_logits(logits, labels, temperature, ignore_index=None)
    given = [t for t in (logits, old_logprobs, ref_logprobs, rewards, old_token_logprobs) if t is not None]
    if not use_triton(impl, *given):
        return token_p3o_loss(
            token_logprobs(
                logits,
                labels,
                temperature=temperature,
                ignore_index=NO_LABEL,
                inplace_backward=inplace_backward,
                impl="eager",
            ),
            cu_seqlens,
            old_logprobs,
            ref_logprobs,
            rewards,
            **objective._asdict(),
            old_token_logprobs=old_token_logprobs,
            impl="eager",
        )
    check_objective(*objective)
    check_inplace(logits, inplace_backward)
    check_token_pairs(len(logits), cu_seqlens, old_logprobs, ref_logprobs, rewards, clipping, old_token_logprobs)
    check_same_device(
        logits=logits,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        old_token_logprobs=old_token_logprobs,
    )
    loss, results = LogitsP3OLoss.apply(
        with_rows(logits),
        labels.contiguous(),
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        old_token_logprobs,
        objective,
        temperature,
        inplace_backward,
    )
    return output(results, loss)
