"""Log-probabilities of tokens -> of sequences.

N tokens, S sequences.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_floating, checked_cu_seqlens
from fastp3o_kernels.operation import HAS_TRITON, first_derivatives_only, graph_break, on_device, use_triton
from fastp3o_kernels.rows import oracle

if HAS_TRITON:
    from fastp3o_kernels.rows.sequence_kernel import launch_sequence_sums


class SequenceSums(torch.autograd.Function):
    """One launch forward; backward each token gets its sequence's gradient."""

    @staticmethod
    def forward(ctx, values, cu_seqlens):
        ctx.save_for_backward(cu_seqlens)
        ctx.tokens = len(values)
        return launch_sequence_sums(values, cu_seqlens)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_sums):
        (cu_seqlens,) = ctx.saved_tensors
        return grad_sums.repeat_interleave(cu_seqlens.long().diff(), output_size=ctx.tokens), None


@graph_break
def sequence_logprobs(token_logprobs: Tensor, cu_seqlens: Tensor | Sequence[int], *, impl: str | None = None) -> Tensor:
    """Log-probability of each sequence: the sum over its tokens, in fixed order; differentiable.

    Args:
        token_logprobs: [N] of any floating dtype.
        cu_seqlens: [S + 1] int32 or int64 on any device, or a list: where each sequence begins; 0 first, N last. The
            sum of an empty one is 0.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        [S] fp32 (fp64 for fp64 log-probs).

    Raises:
        ValueError: for shapes and dtypes that disagree or offsets that do not go from 0 to N in order (on a GPU only
            with FASTP3O_DEBUG=1).
    """
    check_floating("token_logprobs", token_logprobs)
    cu_seqlens = on_device(checked_cu_seqlens(cu_seqlens, token_logprobs), token_logprobs.device)
    if use_triton(impl, token_logprobs) and len(token_logprobs) > 0:
        return SequenceSums.apply(token_logprobs.float().contiguous(), cu_seqlens.contiguous())
    return oracle.sequence_logprobs(token_logprobs, cu_seqlens)
