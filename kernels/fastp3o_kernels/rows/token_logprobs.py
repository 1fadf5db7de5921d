"""Logits -> the log-probability of each label.

N tokens, V vocabulary.
"""

from collections.abc import Collection
from typing import overload

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_logits
from fastp3o_kernels.dispatch import HAS_TRITON, use_triton
from fastp3o_kernels.first_derivatives import first_derivatives_only
from fastp3o_kernels.rows import eager
from fastp3o_kernels.rows.eager import at_least_fp32
from fastp3o_kernels.rows.inplace import DlogitsMemory, check_inplace, with_distinct_rows
from fastp3o_kernels.rows.statistics import TokenOutputs, asked_for, check_outputs, of_logits
from fastp3o_kernels.rows.transform import LogitsTransform
from fastp3o_kernels.uncompiled import uncompiled

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import launch_dlogits, launch_logprobs
    from fastp3o_kernels.rows.statistics_kernel import launch_entropy_dlogits, launch_statistics


class TokenLogprobs(torch.autograd.Function):
    """One launch forward, one backward; with statistics one more forward."""

    @staticmethod
    def forward(ctx, logits, labels, transform, ignore_index, inplace_backward, statistics):
        ctx.set_materialize_grads(False)
        logprobs, row_max, log_sum = launch_logprobs(logits, labels, transform, ignore_index)
        values = launch_statistics(logits, labels, row_max, log_sum, transform, ignore_index) if statistics else ()
        # The entropy that is given back may be changed in place.
        ctx.save_for_backward(logits, labels, row_max, log_sum, *(entropy.clone() for entropy in values[:1]))
        ctx.mark_non_differentiable(*values[1:])
        ctx.transform, ctx.ignore_index = transform, ignore_index
        ctx.memory = DlogitsMemory(inplace=inplace_backward)
        return logprobs, *values

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_logprobs, grad_entropy=None, *_):
        ctx.memory.check_first_use()
        logits, labels, row_max, log_sum = ctx.saved_tensors[:4]
        dlogits = ctx.memory.like(logits)
        coefficients = torch.zeros_like(row_max) if grad_logprobs is None else grad_logprobs.contiguous()
        rows, transform = (logits, labels, row_max, log_sum), (ctx.transform, ctx.ignore_index)
        if grad_entropy is None:
            launch_dlogits(*rows, coefficients, None, *transform, out=dlogits)
        else:
            given = ctx.saved_tensors[4], coefficients, grad_entropy.contiguous()
            launch_entropy_dlogits(*rows, *given, *transform, out=dlogits)
        return dlogits, *[None] * 5


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    outputs: None = None,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> Tensor: ...
@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    outputs: Collection[str],
    inplace_backward: bool = False,
    impl: str | None = None,
) -> TokenOutputs: ...
@uncompiled
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    outputs: Collection[str] | None = None,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> Tensor | TokenOutputs:
    """log softmax(logits / temperature) at each token's label.

    Args:
        logits: [N, V] of any floating dtype and strides; -inf is allowed. Rounding logits to bf16 costs about 0.03 nats
            per token, so 0.3 in the log-probability of a response of 128 tokens: more than a clip range. Hidden states
            and the head go to `linear_logprobs`, whose logits are fp32 and never exist all at once.
        labels: [N] int64 or int32, from 0 to V - 1, or ignore_index.
        temperature: divides the logits.
        ignore_index: tokens with this label give 0 and no gradient.
        outputs: of "entropy" (differentiable), "mean_logit" and "is_top", what to give beside the log-probs.
        inplace_backward: the gradient takes the logits' memory (with Triton), so backward runs once and the logits'
            values are gone afterwards. The eager implementation leaves them alone.
        impl: None: Triton where it is installed, all tensors are on a GPU and none is fp64, else PyTorch. "triton" and
            "eager" force.

    Returns:
        [N] fp32 (fp64 for fp64 logits), never above 0. With `outputs`: TokenOutputs.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree, for a label out of range, for an in-place backward pass
            over a leaf. Values on a GPU are looked at only with FASTP3O_DEBUG=1; a label out of range gives NaN there.
    """
    transform = LogitsTransform(temperature=temperature)
    check_logits(logits, labels, ignore_index)
    check_inplace(logits, inplace_backward)
    check_outputs(outputs or ())
    if not use_triton(impl, logits) or len(logits) == 0:
        logprobs = eager.token_logprobs(logits, labels, temperature=temperature, ignore_index=ignore_index)
        values = of_logits(at_least_fp32(logits) / temperature, labels, ignore_index) if outputs is not None else ()
    else:
        given = with_distinct_rows(logits), labels.contiguous(), transform, ignore_index, inplace_backward
        logprobs, *values = TokenLogprobs.apply(*given, outputs is not None)
    return asked_for(outputs, logprobs, *values) if outputs is not None else logprobs
