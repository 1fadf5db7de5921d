"""Hidden states and a head -> the log-probability of each label, never all logits at once.

N tokens, D hidden size, V vocabulary, F = N V D.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor

from fastp3o_kernels.checks import (
    bounds_of_prompts,
    check_positive_whole_number,
    checked_cu_seqlens,
)
from fastp3o_kernels.head import eager
from fastp3o_kernels.head.chunks import TILE
from fastp3o_kernels.head.fsdp import reduced
from fastp3o_kernels.head.head import Head, HeadDtypes, HeadLike, check_head
from fastp3o_kernels.head.one_pass import chunked_head, gradients_of
from fastp3o_kernels.operation import first_derivatives_only, graph_break, use_triton
from fastp3o_kernels.rows.logprobs import TokenOutputs, check_outputs, token_outputs


class LinearLogprobs(torch.autograd.Function):
    """2 F operations forward; backward 4 F, and 2 F for the tokens whose logits, or the
    exponentials of whose logits, have left their buffer by then. weight, bias, labels: the head's
    own and those of `chunked`, which autograd sees only as arguments.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, head, chunked):
        ctx.set_materialize_grads(False)
        spans = [span for chunk in chunked.plan.chunks for span in chunk.spans]
        chunked.differentiable = any(ctx.needs_input_grad)
        with chunked.holding(hidden, head):
            for span in spans:
                chunked.forward(span)
        logprobs = chunked.logprobs
        # The entropy that is given back may be changed in place.
        values = (
            (chunked.statistics[0].clone(), *chunked.statistics[1:]) if chunked.statistics else ()
        )
        ctx.mark_non_differentiable(*values[1:])
        if any(ctx.needs_input_grad):
            # Autograd keeps the tensors and refuses changes to them; the context keeps only the
            # head's numbers.
            ctx.save_for_backward(hidden, weight, bias, labels)
            ctx.head_without_tensors = replace(head, weight=weight.new_empty(0), bias=None)
            # An output held by the context would hold its own graph.
            del chunked.logprobs, chunked.labels
            ctx.chunked, ctx.spans = chunked, spans
        else:
            chunked.release()
        return logprobs, *values

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_logprobs, grad_entropy=None, *_):
        chunked = ctx.chunked
        hidden, weight, bias, chunked.labels = ctx.saved_tensors
        # Of logits that are computed again, for nobody.
        chunked.logprobs = torch.empty_like(chunked.row_max)
        head = replace(ctx.head_without_tensors, weight=weight, bias=bias)
        with chunked.holding(hidden, head):
            gradients = gradients_of(chunked, hidden, head, ctx.needs_input_grad[:3])
            ignored = chunked.labels == chunked.ignore_index
            if grad_logprobs is None:  # the entropy's gradient only
                grad_logprobs = torch.zeros_like(chunked.row_max)
            entropy_coefficients = (
                None if grad_entropy is None else grad_entropy.masked_fill(ignored, 0.0)
            )
            gradients.backward(
                ctx.spans, grad_logprobs.masked_fill(ignored, 0.0), entropy_coefficients
            )
            gradients.finish()
            return *gradients.results(), None, None, None


@overload
def linear_logprobs(
    hidden: Tensor,
    head: HeadLike,
    labels: Tensor,
    *,
    ignore_index: int = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    responses_per_prompt: int = ...,
    outputs: None = ...,
    memory_budget: int | None = ...,
    impl: str | None = ...,
) -> Tensor: ...
@overload
def linear_logprobs(
    hidden: Tensor,
    head: HeadLike,
    labels: Tensor,
    *,
    ignore_index: int = ...,
    cu_seqlens: Tensor | Sequence[int] | None = ...,
    responses_per_prompt: int = ...,
    outputs: Collection[str],
    memory_budget: int | None = ...,
    impl: str | None = ...,
) -> TokenOutputs: ...
@graph_break
def linear_logprobs(
    hidden: Tensor,
    head: HeadLike,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    responses_per_prompt: int = 2,
    outputs: Collection[str] | None = None,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> Tensor | TokenOutputs:
    """log softmax of a head's logits at each token's label; differentiable, for any loss over
    log-probabilities.

    Logits are fp32: the products of bf16 or fp16 operands are not rounded to 16 bits, which would
    move the log-ratio of a 128-token response by a tenth.

    Args:
        hidden: [N, D], the hidden states that predict the labels; of a half, single or double
            floating dtype.
        head: Head with a weight [V, D] of the same dtype, an `nn.Linear`, or the bare weight. Under
            autocast both may be fp32 and are multiplied in autocast's dtype; the gradients keep
            their tensors' dtypes.
        labels: [N] int64 or int32, from 0 to V - 1, or ignore_index.
        ignore_index: tokens with this label give 0 and no gradient. On a GPU they take part in the
            matrix products all the same: many of them, as in padded rows, are better left out
            before.
        cu_seqlens: [P K + 1] offsets of the responses to P prompts, K = responses_per_prompt to
            each, on any device or as a list. Tokens then go through the head in the chunks of
            `linear_p3o_loss`; with the same budget the ratio of two evaluations of the same weights
            is exactly 1.
        outputs: what to return next to the log-probs, from the same matrix product: any of
            "entropy" (differentiable), "mean_logit" and "is_top".
        memory_budget: bytes of scratch for logits and their gradient (default: 960 MB; a twentieth
            of a larger GPU, up to 4 GB). Only the gradients take memory as well: the weight's is
            summed in fp32 over chunks. A GPU keeps what the gradient needs of all logits that the
            budget holds for the backward pass, in the dtype of the hidden states, and computes the
            others again; a CPU keeps those of the last tokens, 134 MB, or a chunk where that is
            more. In bf16 the budget grows by 2 V D bytes, those of a sum over several parts, where
            that holds all gradients at once.
        impl: None: in chunks, with Triton if it is installed, all tensors are on a GPU and none is
            fp64, else with PyTorch. "triton" forces the former; "eager" computes all logits in one
            PyTorch graph.

    Returns:
        [N] fp32 (fp64 for fp64 hidden states), never above 0. With `outputs`: TokenOutputs.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree, for a label out of range, and for a
            budget that holds no row of logits. Values on a GPU are looked at only with
            FASTP3O_DEBUG=1; a label out of range gives NaN there.
    """
    head = Head.from_layer(head)
    check_head(hidden, head, labels, ignore_index)
    head = reduced(head)
    check_outputs(outputs or ())
    if cu_seqlens is not None:
        check_positive_whole_number("responses_per_prompt", responses_per_prompt)
        cu_seqlens = checked_cu_seqlens(
            cu_seqlens, hidden, responses_per_prompt=responses_per_prompt
        )
    dtypes = HeadDtypes.for_hidden(hidden)
    triton = use_triton(impl, hidden, head.weight, head.bias)
    if impl == "eager" or len(hidden) == 0:
        values = eager.linear_outputs(
            hidden, head, labels, ignore_index, dtypes.rounded, outputs or ()
        )
        return values.logprobs if outputs is None else values
    N = len(hidden)
    # Tokens without groups may be parted anywhere: PyTorch is quicker with logits that stay in a
    # processor's caches.
    bounds = [0, N] if triton else [*range(0, N, TILE), N]
    if cu_seqlens is not None:
        bounds = bounds_of_prompts(cu_seqlens, N, responses_per_prompt)
    labels = labels.contiguous()
    given = {"triton": triton, "statistics": bool(outputs), "keeps": torch.is_grad_enabled()}
    chunked = chunked_head(hidden, head, labels, ignore_index, bounds, memory_budget, **given)
    logprobs, *statistics = LinearLogprobs.apply(
        hidden, head.weight, head.bias, labels, head, chunked
    )
    return logprobs if outputs is None else token_outputs(outputs, logprobs, *statistics)
