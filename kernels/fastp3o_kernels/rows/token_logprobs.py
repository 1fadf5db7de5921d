"""Logits -> the log-probability of each label.

N tokens, V vocabulary.
"""

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_logits
from fastp3o_kernels.dispatch import HAS_TRITON, use_triton
from fastp3o_kernels.rows import eager
from fastp3o_kernels.rows.inplace import DlogitsMemory, check_inplace, with_distinct_rows
from fastp3o_kernels.rows.transform import LogitsTransform

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import launch_dlogits, launch_logprobs


class TokenLogprobs(torch.autograd.Function):
    """One launch forward, one backward."""

    @staticmethod
    def forward(ctx, logits, labels, transform, ignore_index, inplace_backward):
        logprobs, row_max, log_sum = launch_logprobs(logits, labels, transform, ignore_index)
        ctx.save_for_backward(logits, labels, row_max, log_sum)
        ctx.transform, ctx.ignore_index = transform, ignore_index
        ctx.memory = DlogitsMemory(inplace=inplace_backward)
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs):
        ctx.memory.check_first_use()
        logits, labels, row_max, log_sum = ctx.saved_tensors
        dlogits = ctx.memory.like(logits)
        coefficients = grad_logprobs.contiguous()
        launch_dlogits(
            logits, labels, row_max, log_sum, coefficients, None, ctx.transform, ctx.ignore_index, out=dlogits
        )
        return dlogits, None, None, None, None


def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    impl: str | None = None,
) -> Tensor:
    """log softmax(logits / temperature) at each token's label.

    Args:
        logits: [N, V] of any floating dtype and strides; -inf is allowed. Rounding logits to bf16 costs about 0.03 nats
            per token, so 0.3 in the log-probability of a response of 128 tokens: more than a clip range. Hidden states
            and the head go to `linear_logprobs`, whose logits are fp32 and never exist all at once.
        labels: [N] int64 or int32, from 0 to V - 1, or ignore_index.
        temperature: divides the logits.
        ignore_index: tokens with this label give 0 and no gradient.
        inplace_backward: the gradient takes the logits' memory (with Triton), so backward runs once and the logits'
            values are gone afterwards. The eager implementation leaves them alone.
        impl: None: Triton where it is installed, all tensors are on a GPU and none is fp64, else PyTorch. "triton" and
            "eager" force.

    Returns:
        [N] fp32 (fp64 for fp64 logits), never above 0.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree, for a label out of range, for an in-place backward pass
            over a leaf. Values on a GPU are looked at only with FASTP3O_DEBUG=1; a label out of range gives NaN there.
    """
    transform = LogitsTransform(temperature=temperature)
    check_logits(logits, labels, ignore_index)
    check_inplace(logits, inplace_backward)
    if not use_triton(impl, logits) or len(logits) == 0:
        return eager.token_logprobs(logits, labels, temperature=temperature, ignore_index=ignore_index)
    return TokenLogprobs.apply(
        with_distinct_rows(logits), labels.contiguous(), transform, ignore_index, inplace_backward
    )
