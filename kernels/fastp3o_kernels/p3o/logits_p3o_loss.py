"""Logits of pairs -> P3O's loss, and back to the gradient of the logits.

N tokens, V vocabulary, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_logits, check_objective, check_same_device
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.objective import Objective, P3OLossOutput
from fastp3o_kernels.p3o.pair_kernel import PairInputs, check_token_pairs, launch_pairs, output, spread
from fastp3o_kernels.rows.on_policy import launch_on_policy
from fastp3o_kernels.rows.token_logprobs import (
    check_inplace,
    dlogits_like,
    launch_dlogits,
    launch_logprobs,
    refuse_second_backward,
    with_rows,
)
from fastp3o_kernels.rows.transform import LogitsTransform

# No label is ignored here: what is not scored has no place in cu_seqlens.
NO_LABEL = -(2**31)


class LogitsP3OLoss(torch.autograd.Function):
    """Two launches forward (rows, pairs) and one backward, which skips reading rows of zero gradient."""

    @staticmethod
    def forward(ctx, logits, labels, pairs, objective, temperature, inplace_backward):
        transform = LogitsTransform(temperature=temperature)
        logprobs, row_max, log_sum = launch_logprobs(logits, labels, transform, NO_LABEL)
        results, coefficients = launch_pairs(logprobs, pairs, objective)
        ctx.save_for_backward(logits, labels, row_max, log_sum, coefficients)
        ctx.transform = transform
        ctx.inplace = inplace_backward
        ctx.overwritten = False
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        refuse_second_backward(ctx)
        logits, labels, row_max, log_sum, coefficients = ctx.saved_tensors
        dlogits = dlogits_like(logits, inplace=ctx.inplace)
        launch_dlogits(logits, labels, row_max, log_sum, coefficients, grad_loss, ctx.transform, NO_LABEL, out=dlogits)
        return dlogits, *[None] * 5


class OnPolicyLogitsP3OLoss(torch.autograd.Function):
    """One launch forward (pairs), which needs no logits, and one backward, which reads them from memory once."""

    @staticmethod
    def forward(ctx, logits, labels, pairs, objective, temperature, inplace_backward):
        logprobs = spread(pairs.old_logprobs.float(), pairs.cu_seqlens, len(logits))
        results, coefficients = launch_pairs(logprobs, pairs._replace(old_token_logprobs=logprobs), objective)
        ctx.save_for_backward(logits, labels, coefficients)
        ctx.transform = LogitsTransform(temperature=temperature)
        ctx.inplace = inplace_backward
        ctx.overwritten = False
        ctx.mark_non_differentiable(results)
        return results[0].clone(), results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, _):
        refuse_second_backward(ctx)
        logits, labels, coefficients = ctx.saved_tensors
        dlogits = dlogits_like(logits, inplace=ctx.inplace)
        launch_on_policy(logits, labels, coefficients, grad_loss, ctx.transform, out=dlogits)
        return dlogits, *[None] * 5


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
    on_policy: bool = False,
    temperature: float = 1.0,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> P3OLossOutput:
    """P3O's loss from the logits that predict the tokens of the responses to P prompts.

    Args:
        logits: [N, V] of any floating dtype. P3O exponentiates sums of log-probabilities: logits rounded to bf16 move
            the log-ratio of a 128-token response by about 0.1, half a clip range. Compute them in fp32, or give hidden
            states to `linear_p3o_loss`.
        labels: [N] int64 or int32, the response tokens, end-of-sequence included.
        cu_seqlens: [P K + 1] int32 or int64, where each response begins in [N].
        old_logprobs, ref_logprobs, rewards: [P, K].
        old_token_logprobs: [N], for clipping="token" and only there: the first author's variant, which clips every
            token's log-probability at the old one ± ε and averages over tokens.
        on_policy: old_logprobs are this very policy's (the first step after a rollout). Ratios are then 1 by
            definition; loss and metrics follow from old_logprobs without a look at the logits, and the backward pass
            reads these from memory once.
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
    check_objective(*objective)
    check_inplace(logits, inplace_backward)
    check_token_pairs(
        len(logits), cu_seqlens, old_logprobs, ref_logprobs, rewards, clipping, old_token_logprobs, on_policy=on_policy
    )
    check_same_device(
        logits=logits,
        cu_seqlens=cu_seqlens,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        rewards=rewards,
        old_token_logprobs=old_token_logprobs,
    )
    if not use_triton(impl, *given):
        logprobs = eager.token_logprobs(logits, labels, temperature=temperature, ignore_index=NO_LABEL)
        if on_policy:
            known = spread(old_logprobs.to(logprobs.dtype), cu_seqlens, len(logprobs))
            logprobs, old_token_logprobs = eager.with_values(logprobs, known), known
        return eager.token_loss(
            logprobs, cu_seqlens, old_token_logprobs, old_logprobs, ref_logprobs, rewards, objective
        )
    loss, results = (OnPolicyLogitsP3OLoss if on_policy else LogitsP3OLoss).apply(
        with_rows(logits),
        labels.contiguous(),
        PairInputs(cu_seqlens, old_logprobs, ref_logprobs, rewards, old_token_logprobs, len(rewards)),
        objective,
        temperature,
        inplace_backward,
    )
    return output(results, loss)
