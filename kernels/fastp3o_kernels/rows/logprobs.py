"""Logits -> the log-probability of each label, its sums over sequences, and statistics of each
token's distribution.

N tokens, V vocabulary, S sequences.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from fastp3o_kernels.checks import (
    check_floating,
    check_labels,
    check_same_device,
    check_tensors,
    checked_cu_seqlens,
)
from fastp3o_kernels.operation import (
    HAS_TRITON,
    first_derivatives_only,
    graph_break,
    on_device,
    use_triton,
)
from fastp3o_kernels.rows import eager
from fastp3o_kernels.rows.rows import NO_LABEL, LogitsTransform, Rows

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import (
        launch_dlogits,
        launch_logprobs,
        launch_statistics,
    )
    from fastp3o_kernels.rows.sequence_kernel import launch_sequence_sums

STATISTICS = ("entropy", "mean_logit", "is_top")


class TokenOutputs(NamedTuple):
    """Values of N tokens, [N] each; None if not asked for. A token whose label is ignored has 0,
    and False.

    logprobs: of the labels, in nats, differentiable.
    entropy: −Σ p log p in nats, differentiable. Tokens of probability 0 add nothing.
    mean_logit: the mean over the vocabulary, after soft cap and temperature.
    is_top: bool, whether no token is likelier than the label.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    mean_logit: Tensor | None = None
    is_top: Tensor | None = None


def check_outputs(outputs: Collection[str]) -> None:
    unknown = sorted(set(outputs) - set(STATISTICS))
    if isinstance(outputs, str) or unknown:
        raise ValueError(f"outputs must be among {', '.join(STATISTICS)}, got {outputs!r}")


def token_outputs(outputs: Collection[str], logprobs: Tensor, *statistics: Tensor) -> TokenOutputs:
    """Log-probs and the statistics that were asked for; `statistics`: all of STATISTICS, or none if
    none was.
    """
    named = dict(zip(STATISTICS, statistics, strict=False))
    return TokenOutputs(logprobs, **{name: named[name] for name in outputs})


class TokenLogprobs(torch.autograd.Function):
    """One launch forward, one backward; with statistics one more forward. Rows of zero gradient are
    not read again.
    """

    @staticmethod
    def forward(ctx, logits, labels, transform, ignore_index, inplace_backward, statistics):
        ctx.set_materialize_grads(False)
        rows = Rows(logits, labels, transform, ignore_index)
        logprobs, row_max, log_sum = launch_logprobs(rows)
        values = launch_statistics(rows, row_max, log_sum) if statistics else ()
        # The entropy that is given back may be changed in place.
        ctx.save_for_backward(
            logits, labels, row_max, log_sum, values[0].clone() if values else None
        )
        ctx.mark_non_differentiable(*values[1:])
        ctx.transform, ctx.ignore_index = transform, ignore_index
        ctx.inplace, ctx.overwritten = inplace_backward, False
        return logprobs, *values

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_logprobs, grad_entropy=None, *_):
        if ctx.overwritten:
            raise RuntimeError(
                "the logits were overwritten by the first backward pass (inplace_backward=True)"
            )
        ctx.overwritten = ctx.inplace
        logits, labels, row_max, log_sum, entropy = ctx.saved_tensors
        if ctx.inplace:
            torch.autograd.graph.increment_version(logits)
        dlogits = logits if ctx.inplace else torch.empty_like(logits)
        rows = Rows(logits, labels, ctx.transform, ctx.ignore_index)
        coefficients = (
            torch.zeros_like(row_max) if grad_logprobs is None else grad_logprobs.contiguous()
        )
        entropy_coefficients = None if grad_entropy is None else grad_entropy.contiguous()
        launch_dlogits(rows, row_max, log_sum, coefficients, dlogits, entropy, entropy_coefficients)
        return dlogits, *[None] * 5


@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = ...,
    ignore_index: int = ...,
    outputs: None = ...,
    inplace_backward: bool = ...,
    impl: str | None = ...,
) -> Tensor: ...
@overload
def token_logprobs(
    logits: Tensor,
    labels: Tensor,
    *,
    temperature: float = ...,
    ignore_index: int = ...,
    outputs: Collection[str],
    inplace_backward: bool = ...,
    impl: str | None = ...,
) -> TokenOutputs: ...
@graph_break
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
        logits: [N, V] of any floating dtype and strides; -inf is allowed. Rounding logits to bf16
            costs about 0.03 nats per token, so 0.3 in the log-probability of a response of 128
            tokens: more than a clip range. Hidden states and the head go to `linear_logprobs`,
            whose logits are fp32 and never exist all at once.
        labels: [N] int64 or int32, from 0 to V - 1, or ignore_index.
        temperature: divides the logits.
        ignore_index: tokens with this label give 0 and no gradient.
        outputs: what to return next to the log-probs: any of "entropy" (differentiable),
            "mean_logit" and "is_top".
        inplace_backward: the gradient takes the logits' memory (with Triton), so backward runs once
            and the logits' values are gone afterwards. The eager implementation does not change
            them.
        impl: None: Triton if it is installed, all tensors are on a GPU and none is fp64, else
            PyTorch. "triton" and "eager" force.

    Returns:
        [N] fp32 (fp64 for fp64 logits), never above 0. With `outputs`: TokenOutputs.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree, for a label out of range, for an
            in-place backward pass over a leaf. Values on a GPU are looked at only with
            FASTP3O_DEBUG=1; a label out of range gives NaN there.
    """
    transform = LogitsTransform(temperature=temperature)
    check_tensors(logits=logits, labels=labels)
    if logits.dim() != 2:
        raise ValueError(f"logits must have shape [N, V], got {list(logits.shape)}")
    check_floating("logits", logits)
    check_same_device(logits=logits, labels=labels)
    ignored = None if ignore_index == NO_LABEL else ignore_index
    check_labels(labels, len(logits), logits.shape[1], ignored, "one label for each row of logits")
    if inplace_backward and logits.requires_grad and logits.is_leaf:
        raise ValueError(
            "inplace_backward=True would overwrite logits, which is a leaf: its values are yours to keep"
        )
    check_outputs(outputs or ())
    if use_triton(impl, logits) and len(logits) > 0:
        # The kernels read and write rows apart from each other.
        if logits.stride(1) != 1 or (logits.stride(0) < logits.shape[1] and len(logits) > 1):
            logits = logits.contiguous()
        arguments = logits, labels.contiguous(), transform, ignore_index, inplace_backward
        logprobs, *statistics = TokenLogprobs.apply(*arguments, bool(outputs))
    else:
        logprobs = eager.token_logprobs(
            logits, labels, temperature=temperature, ignore_index=ignore_index
        )
        statistics = ()
        if outputs:
            statistics = eager.statistics(
                eager.at_least_fp32(logits) / temperature, labels, ignore_index
            )
    return logprobs if outputs is None else token_outputs(outputs, logprobs, *statistics)


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
def sequence_logprobs(
    token_logprobs: Tensor, cu_seqlens: Tensor | Sequence[int], *, impl: str | None = None
) -> Tensor:
    """Log-probability of each sequence: the sum over its tokens, in fixed order; differentiable.

    Args:
        token_logprobs: [N] of any floating dtype.
        cu_seqlens: [S + 1] int32 or int64 on any device, or a list: where each sequence begins; 0
            first, N last. The sum of an empty one is 0.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        [S] fp32 (fp64 for fp64 log-probs).

    Raises:
        ValueError: for shapes and dtypes that disagree or offsets that do not go from 0 to N in
            order (on a GPU only with FASTP3O_DEBUG=1).
    """
    check_tensors(token_logprobs=token_logprobs)
    check_floating("token_logprobs", token_logprobs)
    cu_seqlens = on_device(checked_cu_seqlens(cu_seqlens, token_logprobs), token_logprobs.device)
    if use_triton(impl, token_logprobs) and len(token_logprobs) > 0:
        return SequenceSums.apply(token_logprobs.float().contiguous(), cu_seqlens.contiguous())
    return eager.sequence_logprobs(token_logprobs, cu_seqlens)
