"""Logits of the responses' tokens -> P3O's loss, and the gradient of the logits.

N tokens, V vocabulary, P prompts with K responses each: sequence K p + k is response k of prompt p.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_logits
from fastp3o_kernels.dispatch import HAS_TRITON, use_triton
from fastp3o_kernels.first_derivatives import first_derivatives_only
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.p3o.coefficients import loss_and_coefficients, on_policy_loss_and_coefficients
from fastp3o_kernels.p3o.output import P3OLossOutput, forward_results, loss_output
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.p3o.settings import DEFAULTS, P3OSettings
from fastp3o_kernels.rows import eager as eager_rows
from fastp3o_kernels.rows.inplace import DlogitsMemory, check_inplace, with_distinct_rows
from fastp3o_kernels.rows.labels import NO_LABEL
from fastp3o_kernels.rows.transform import LogitsTransform
from fastp3o_kernels.uncompiled import uncompiled

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import launch_dlogits, launch_logprobs
    from fastp3o_kernels.rows.on_policy_kernel import launch_on_policy


class LogitsP3OLoss(torch.autograd.Function):
    """Two launches forward (rows, pairs) and one backward, which skips reading rows of zero gradient."""

    @staticmethod
    def forward(ctx, logits, labels, pairs, settings, transform, inplace_backward):
        logprobs, row_max, log_sum = launch_logprobs(logits, labels, transform, NO_LABEL)
        results, coefficients = loss_and_coefficients(logprobs, pairs, settings, triton=True)
        ctx.save_for_backward(logits, labels, row_max, log_sum, coefficients)
        ctx.transform, ctx.memory = transform, DlogitsMemory(inplace=inplace_backward)
        return forward_results(ctx, results)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss, _):
        ctx.memory.check_first_use()
        logits, labels, row_max, log_sum, coefficients = ctx.saved_tensors
        dlogits = ctx.memory.like(logits)
        launch_dlogits(logits, labels, row_max, log_sum, coefficients, grad_loss, ctx.transform, NO_LABEL, out=dlogits)
        return dlogits, *[None] * 5


class OnPolicyLogitsP3OLoss(torch.autograd.Function):
    """One launch forward (pairs), which needs no logits, and one backward, which reads them from memory once."""

    @staticmethod
    def forward(ctx, logits, labels, pairs, settings, transform, inplace_backward):
        given = pairs, len(logits), torch.float32, settings
        results, coefficients = on_policy_loss_and_coefficients(*given, triton=True)
        ctx.save_for_backward(logits, labels, coefficients)
        ctx.transform, ctx.memory = transform, DlogitsMemory(inplace=inplace_backward)
        return forward_results(ctx, results)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss, _):
        ctx.memory.check_first_use()
        logits, labels, coefficients = ctx.saved_tensors
        dlogits = ctx.memory.like(logits)
        launch_on_policy(logits, labels, coefficients, grad_loss, ctx.transform, out=dlogits)
        return dlogits, *[None] * 5


@uncompiled
def logits_p3o_loss(
    logits: Tensor,
    labels: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    rewards: Tensor,
    settings: P3OSettings = DEFAULTS,
    *,
    old_token_logprobs: Tensor | None = None,
    valid_responses: Tensor | None = None,
    divisor: float | Tensor | None = None,
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
        cu_seqlens: [P K + 1] int32 or int64 on any device, or a list: where each response begins in [N]. An empty
            response takes part in no pair.
        old_logprobs, ref_logprobs, rewards: [P, K].
        settings, valid_responses: as in `p3o_loss`.
        old_token_logprobs: [N], for clipping="token" and only there, as in `token_p3o_loss`.
        divisor: of the sum over prompts, or tokens with clipping="token", as in `token_p3o_loss`.
        on_policy: old_logprobs are this very policy's (the first step after a rollout). Ratios are then 1 by
            definition; loss and metrics follow from old_logprobs without reading the logits, and the backward pass
            reads these from memory once.
        temperature: divides the logits.
        inplace_backward: as in `token_logprobs`.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        P3OLossOutput; the gradient reaches the logits. Rows without a gradient are not read in backward.

    Raises:
        ValueError: as in `token_logprobs`, `sequence_logprobs` and `p3o_loss`.
    """
    transform = LogitsTransform(temperature=temperature)
    check_logits(logits, labels, ignore_index=None)
    check_inplace(logits, inplace_backward)
    pairs = PairInputs.checked(
        "logits",
        logits,
        cu_seqlens,
        old_logprobs,
        ref_logprobs,
        rewards,
        settings,
        valid_responses=valid_responses,
        old_token_logprobs=old_token_logprobs,
        divisor=divisor,
        on_policy=on_policy,
    )
    if not use_triton(impl, logits, *pairs.floating.values()) or len(logits) == 0:
        logprobs = eager_rows.token_logprobs(logits, labels, temperature=temperature, ignore_index=NO_LABEL)
        return eager.token_loss(logprobs, pairs, settings, on_policy=on_policy)
    function = OnPolicyLogitsP3OLoss if on_policy else LogitsP3OLoss
    logits, labels = with_distinct_rows(logits), labels.contiguous()
    return loss_output(*function.apply(logits, labels, pairs, settings, transform, inplace_backward))
