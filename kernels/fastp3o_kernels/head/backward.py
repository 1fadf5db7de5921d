"""The chunked head's backward pass: dL/d(log-prob) of each token -> gradients of hidden states, weight and bias.

Gradients of logits wait in a buffer for their products until it is full, longer than the one for logits: the weight's
gradient is read and written once for each filling, and small chunks would spend their time on that. Tokens whose
coefficient is zero (clipped pairs, pairs of equal advantage, ignored labels) are left out of the products.

N tokens, n tokens of a span, k tokens of a filling, D hidden size, V vocabulary, F = N V D. Each gradient costs 2 F
operations.
"""

import torch
from torch import Tensor

from fastp3o_kernels.head.dtypes import multiply
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.head import Head
from fastp3o_kernels.operation import HAS_TRITON
from fastp3o_kernels.rows import fallback

if HAS_TRITON:
    from fastp3o_kernels.head.scale_kernel import launch_scale
    from fastp3o_kernels.rows.logits_kernel import launch_dlogits

# Rows of the buffer that move at once, through a copy that the budget does not hold.
ROWS_MOVED = 32

# fp16 ends at 65504 and is coarse below 6e-5, so coefficients of fp16 products are multiplied by a power of two that
# brings the largest one here. At a sixteenth of it a probability of 1e-6 keeps three digits, and products with large
# weights stay finite.
LARGEST = 1024.0
# The scale while no coefficient is above 0.
HIGHEST = 2.0**64

Moves = list[tuple[Tensor, Tensor]]


class WaitingTokens:
    """The tokens that wait, each with a row of the buffer, and flags: whether a token has a coefficient.

    The host reads the flags when the buffer is full; they were sent when each span came. The device then has a later
    span's logits to work on, so neither waits for the other.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.number = 0
        self.tokens: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.sent: torch.cuda.Event | None = None

    def add(self, span: slice, counts: Tensor) -> None:
        """A span's tokens have the next rows of the buffer. counts: [n] bool, which of them have a coefficient."""
        self.number += span.stop - span.start
        self.tokens.append(torch.arange(span.start, span.stop))
        self.flags.append(counts.to("cpu", non_blocking=True))
        if counts.is_cuda:
            self.sent = torch.cuda.Event()
            self.sent.record(torch.cuda.current_stream(counts.device))

    def release(self) -> tuple[Tensor, Moves]:
        """The k tokens with a coefficient, in the order of their rows after moves (from rows, to rows).

        Rows from the buffer's end move to where a token has no coefficient, so that the first k rows hold the rest. No
        token waits afterwards.
        """
        if self.number == 0:
            return torch.empty(0, dtype=torch.long), []
        if self.sent is not None:
            self.sent.synchronize()
        tokens, kept = torch.cat(self.tokens), torch.cat(self.flags)
        self.clear()
        k = int(kept.sum())
        target = (~kept[:k]).nonzero().squeeze(1)
        source = k + kept[k:].nonzero().squeeze(1)
        tokens[target] = tokens[source]
        moves = zip(source.split(ROWS_MOVED), target.split(ROWS_MOVED), strict=True) if len(source) else []
        return tokens[:k], list(moves)


class HeadGradients:
    """Gradients of one evaluation of the head, while it holds hidden states and head.

    hidden, head: the caller's; only their dtypes and shapes count here.
    needs: whether hidden, weight and bias get a gradient.
    """

    def __init__(self, chunked: ChunkedHead, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool]):
        self.chunked, self.finished = chunked, False
        plan = chunked.plan
        self.triton, self.logits_dtype = chunked.triton, plan.dtypes.logits
        self.waiting = WaitingTokens()
        self.dtypes = [tensor.dtype if tensor is not None else None for tensor in (hidden, head.weight, head.bias)]
        needs_hidden, self.needs_weight, needs_bias = needs
        self.dlogits_buffer = hidden.new_empty(plan.dlogits_rows, plan.row_elements, dtype=plan.dtypes.multiplied)
        self.dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        self.dweight: Tensor | None = None
        self.dbias = hidden.new_zeros(plan.V, dtype=self.logits_dtype) if needs_bias else None
        # Factor of the gradients until `results`, 0-d on the device; None: 1.
        fp16 = plan.dtypes.multiplied == torch.float16
        self.scale = torch.full((), HIGHEST, device=hidden.device) if fp16 else None

    def backward(self, spans: list[slice], coefficients: Tensor, entropy_coefficients: Tensor | None = None) -> None:
        """Adds neighbouring spans through which the head has gone forward, with dL/d(log-prob) of all their tokens, and
        dL/d(entropy) if that counts.
        """
        if not spans:
            return
        if self.scale is not None:
            self.scale = self.lowered_scale(self.scale, coefficients, entropy_coefficients)
            coefficients = coefficients * self.scale
            if entropy_coefficients is not None:
                entropy_coefficients = entropy_coefficients * self.scale
        first = spans[0].start
        # The last span's logits are still in their buffer.
        for span in reversed(spans):
            own = slice(span.start - first, span.stop - first)
            self.add(span, coefficients[own], None if entropy_coefficients is None else entropy_coefficients[own])

    def lowered_scale(self, scale: Tensor, coefficients: Tensor, entropy_coefficients: Tensor | None) -> Tensor:
        """The scale for further coefficients, to which all gradients so far are brought. The host never waits."""
        given = [values for values in (coefficients, entropy_coefficients) if values is not None]
        largest = torch.stack([values.abs().max() for values in given]).max()
        lowered = torch.minimum(torch.exp2(torch.floor(torch.log2(LARGEST / largest))), scale)
        waiting = self.dlogits_buffer[: self.waiting.number]
        for gradient in (waiting, self.dhidden, self.dweight, self.dbias):
            if gradient is not None:
                scaled(gradient, lowered / scale, gradient.dtype, triton=self.triton)
        return lowered

    def add(self, span: slice, coefficients: Tensor, entropy_coefficients: Tensor | None) -> None:
        chunked, counts = self.chunked, coefficients != 0
        if entropy_coefficients is not None:
            counts = counts | (entropy_coefficients != 0)
        out, rows = self.room_for(span, counts), chunked.rows(span)
        if not self.triton:
            fallback.dlogits(rows, coefficients, entropy_coefficients, out)
            return
        given = rows, chunked.row_max[span], chunked.log_sum[span], coefficients, out
        if entropy_coefficients is None:
            launch_dlogits(*given)
        else:
            launch_dlogits(*given, entropy=chunked.statistics[0][span], entropy_coefficients=entropy_coefficients)

    def room_for(self, span: slice, counts: Tensor) -> Tensor:
        """The part of the buffer for the gradient of a span's logits, [n, V]. counts: [n] bool, which are not zero."""
        if self.waiting.number + span.stop - span.start > len(self.dlogits_buffer):
            self.multiply_waiting(last=False)
        begin = self.waiting.number
        self.waiting.add(span, counts)
        return self.dlogits_buffer[begin : self.waiting.number, : self.chunked.plan.V]

    def multiply_waiting(self, *, last: bool) -> None:
        """The gradients' products over all tokens that wait and have a coefficient."""
        tokens, moves = self.waiting.release()
        if len(tokens) == 0:
            return
        buffer = self.dlogits_buffer
        for source, target in moves:
            buffer[target.to(buffer.device)] = buffer[source.to(buffer.device)]
        dlogits = buffer[: len(tokens), : self.chunked.plan.V]
        # Neighbours are read and written in place.
        adjacent = bool((tokens.diff() == 1).all())
        index = slice(int(tokens[0]), int(tokens[-1]) + 1) if adjacent else tokens.to(buffer.device)
        if self.dhidden is not None:
            self.write_dhidden(self.dhidden, dlogits, index)
        if self.needs_weight:
            self.add_to_dweight(dlogits, self.chunked.hidden[index], last=last)
        if self.dbias is not None:
            self.dbias += dlogits.sum(dim=0, dtype=self.dbias.dtype)

    def write_dhidden(self, dhidden: Tensor, dlogits: Tensor, index: slice | Tensor) -> None:
        if isinstance(index, slice):
            multiply(dlogits, self.chunked.weight, out=dhidden[index])
        else:
            product = dhidden.new_empty(len(dlogits), dhidden.shape[1])
            multiply(dlogits, self.chunked.weight, out=product)
            dhidden[index] = product

    def add_to_dweight(self, dlogits: Tensor, hidden: Tensor, *, last: bool) -> None:
        first = self.dweight is None
        if self.dweight is None:
            # fp32 where several fillings of the buffer are summed; a single product's own sum is fp32 inside already.
            bf16 = self.dtypes[1] == self.chunked.plan.dtypes.multiplied == torch.bfloat16
            dtype = torch.bfloat16 if last and bf16 else self.logits_dtype
            self.dweight = torch.empty_like(self.chunked.weight, dtype=dtype, memory_format=torch.contiguous_format)
        multiply(dlogits.T, hidden, out=self.dweight, accumulate=not first)

    def finish(self) -> None:
        """The last products. Buffers are freed."""
        if self.finished:
            return
        self.multiply_waiting(last=True)
        if self.needs_weight and self.dweight is None:
            self.dweight = torch.zeros_like(self.chunked.weight, memory_format=torch.contiguous_format)
        del self.chunked, self.dlogits_buffer
        self.finished = True

    def results(self, incoming: Tensor | None = None) -> list[Tensor | None]:
        """Gradients of hidden [N, D], weight [V, D] and bias [V] in their dtypes, None where not needed.

        incoming: 0-d, the gradient of the loss, which they are multiplied by; None: 1.
        """
        self.finish()
        factor = incoming
        if self.scale is not None:
            factor = (1.0 if incoming is None else incoming) / self.scale
        return [
            None if gradient is None or dtype is None else scaled(gradient, factor, dtype, triton=self.triton)
            for gradient, dtype in zip((self.dhidden, self.dweight, self.dbias), self.dtypes, strict=True)
        ]


def scaled(values: Tensor, factor: Tensor | None, dtype: torch.dtype, *, triton: bool) -> Tensor:
    """values times a 0-d tensor (None: 1), in `dtype`; in their own memory if that is their dtype. The host does not
    wait.
    """
    if factor is None:
        return values.to(dtype)
    if values.dtype != dtype:
        return torch.mul(values, factor, out=torch.empty_like(values, dtype=dtype))
    if not triton:
        # In place a half would round the number itself to half precision first.
        return values.mul_(factor) if values.dtype == factor.dtype else values.copy_(values.to(factor.dtype) * factor)
    launch_scale(values, factor)
    return values
