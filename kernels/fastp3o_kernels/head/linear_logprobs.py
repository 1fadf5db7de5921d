"""Hidden states and the head's weight -> the log-probability of each label, and back, never all logits at once.

N rows, D hidden size, V vocabulary, F = N V D.
"""

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_cu_seqlens, check_head
from fastp3o_kernels.dispatch import use_triton
from fastp3o_kernels.head.backward import HeadGradients
from fastp3o_kernels.head.chunks import Chunks, plan_chunks
from fastp3o_kernels.head.forward import ChunkedHead, Products
from fastp3o_kernels.p3o import eager
from fastp3o_kernels.rows.transform import LogitsTransform


class LinearLogprobs(torch.autograd.Function):
    """2 F operations forward; backward 4 F, and 2 F for the rows whose logits have left the buffer by then."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, softcap, temperature, ignore_index, products, chunks, triton):
        transform = LogitsTransform(bias, softcap, temperature)
        with torch.autocast(hidden.device.type, enabled=False):
            head = ChunkedHead(hidden, weight, labels, transform, ignore_index, products, chunks, triton=triton)
            for chunk in chunks.chunks:
                for rows in chunk:
                    head.forward(rows)
        logprobs = head.logprobs
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(hidden, weight, bias)
            # Autograd keeps the inputs, and an output held here would hold its own graph.
            head.drop()
            head.logprobs = None
            ctx.head = head
        return logprobs

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs):
        hidden, weight, bias = ctx.saved_tensors
        head = ctx.head
        with torch.autocast(hidden.device.type, enabled=False):
            head.take(hidden, weight)
            gradients = HeadGradients(head, hidden, weight, bias, ctx.needs_input_grad[:3])
            coefficients = grad_logprobs.masked_fill(head.labels == head.ignore_index, 0.0)
            pieces = [rows for chunk in head.chunks.chunks for rows in chunk]
            for rows in reversed(pieces):
                gradients.backward(rows, coefficients[rows])
            results = gradients.times(grad_logprobs.new_ones(()))
            head.drop()
        return *results, *[None] * 7


def chunks_for(bounds: list[int], V: int, products: Products, memory_budget: int | None) -> Chunks:
    return plan_chunks(bounds, V, products.logits.itemsize, products.scratch.itemsize, memory_budget)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    cu_seqlens: Tensor | None = None,
    responses_per_prompt: int = 2,
    memory_budget: int | None = None,
    impl: str | None = None,
) -> Tensor:
    """log softmax of a head's logits at each row's label; differentiable, for any loss over log-probabilities.

    The logits are (cap tanh((hidden weightᵀ + bias) / cap)) / temperature, in fp32: the products of bf16 or fp16
    operands are not rounded to 16 bits, which would move the log-ratio of a 128-token response by a tenth.

    Args:
        hidden: [N, D], the hidden states that predict the labels; of a half, single or double floating dtype.
        weight: [V, D] of the same dtype, the head's; may be tied to the embedding. Under autocast both may be fp32 and
            are multiplied in autocast's dtype; the gradients keep their tensors' dtypes.
        labels: [N] int64 or int32, from 0 to V - 1, or ignore_index.
        bias: [V] of any floating dtype. softcap: Gemma's cap on logits, applied before the temperature.
        temperature: divides the logits. ignore_index: rows with this label give 0 and no gradient.
        cu_seqlens: [P K + 1] offsets of the responses to P prompts, K = responses_per_prompt to each, on any device.
            Rows then go through the head in the chunks of `linear_p3o_loss`; with the same budget the ratio of two
            evaluations of the same weights is exactly 1.
        memory_budget: bytes of scratch for logits and their gradient (default: chunks.MEMORY_BUDGET). Beside it only
            the gradients take memory: the weight's is summed in fp32 over chunks. Logits that still lie in the budget's
            buffer are kept for the backward pass, the others computed again.
        impl: None: in chunks, with Triton where all tensors are on a GPU and none is fp64, else with PyTorch. "triton"
            forces the former; "eager" materialises all logits in one PyTorch graph.

    Returns:
        [N] fp32 (fp64 for fp64 hidden states), never above 0.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree, for a label out of range, and for a budget that holds
            no row. Values on a GPU are looked at only with FASTP3O_DEBUG=1; a label out of range gives NaN there.
    """
    check_head(hidden, weight, labels, bias, temperature, softcap, ignore_index)
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, len(hidden), responses_per_prompt=responses_per_prompt)
    products = Products(hidden)
    triton = use_triton(impl, hidden, weight, *([] if bias is None else [bias]))
    if impl == "eager" or len(hidden) == 0:
        logits = eager.linear_logits(hidden, weight, bias, softcap, products.operands)
        return eager.token_logprobs(logits, labels, temperature=temperature, ignore_index=ignore_index)
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    bounds = [0, len(hidden)] if cu_seqlens is None else cu_seqlens[::responses_per_prompt].tolist()
    return LinearLogprobs.apply(
        hidden,
        weight,
        bias,
        labels.contiguous(),
        softcap,
        temperature,
        ignore_index,
        products,
        chunks_for(bounds, len(weight), products, memory_budget),
        triton,
    )
