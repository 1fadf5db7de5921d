"""The chunked head's backward pass: dL/d(log-prob) of each token -> gradients of hidden states,
weight and bias.

From the kernels, gradients of logits wait in a buffer for their products until it is full, longer
than the one for logits: the weight's gradient is read and written once for each filling, and small
chunks would spend their time on it. PyTorch writes them where the logits were, and multiplies at
once.

The host never waits for the device. So it cannot know there how many tokens have a coefficient of
zero (clipped pairs, pairs of equal advantage, ignored labels): on a GPU they take part in the
products as rows of zeros. On a CPU they are left out.

N tokens, n tokens of a span, k tokens of a filling, D hidden size, V vocabulary, F = N V D. Each
gradient costs 2 F operations.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.head import Head, multiply
from fastp3o_kernels.operation import HAS_TRITON, on_device

if HAS_TRITON:
    from fastp3o_kernels.head.scale_kernel import launch_lowered_scale, launch_scale

# Rows of the buffer that move at once, through a copy that the budget does not hold.
ROWS_MOVED = 32

# fp16 ends at 65504 and is coarse below 6e-5, so coefficients of fp16 products are multiplied by a
# power of two that brings the largest one here. At a sixteenth of it a probability of 1e-6 keeps
# three digits, and products with large weights stay finite.
LARGEST_SCALED = 1024.0
# The scale while no coefficient is above 0.
HIGHEST_SCALE = 2.0**64


# --- gradients, chunk by chunk --------------------------------------------------------------------


class HeadGradients:
    """Gradients of one evaluation of the head, while it holds hidden states and head.

    hidden, head: the caller's; only their dtypes and shapes count here.
    needs: whether hidden, weight and bias get a gradient.
    """

    def __init__(
        self, chunked: ChunkedHead, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool]
    ):
        self.chunked, plan = chunked, chunked.plan
        self.triton, self.logits_dtype = chunked.triton, plan.dtypes.logits
        # numbers of the tokens that wait, each with a row of the buffer
        self.waiting: list[Tensor] = []
        self.filled = 0  # rows of the buffer
        self.dtypes = [
            tensor.dtype if tensor is not None else None
            for tensor in (hidden, head.weight, head.bias)
        ]
        needs_hidden, self.needs_weight, needs_bias = needs
        rows = 0 if plan.in_place or plan.one_pass else plan.dlogits_rows
        self.dlogits_buffer = hidden.new_empty(rows, plan.row_elements, dtype=plan.dtypes.dlogits)
        self.dhidden = (
            torch.zeros_like(hidden, memory_format=torch.contiguous_format)
            if needs_hidden
            else None
        )
        self.dweight: Tensor | None = None
        # Its terms cancel: they are summed before gradients of logits are rounded for their
        # products.
        self.dbias = (
            hidden.new_zeros(len(head.weight), dtype=self.logits_dtype) if needs_bias else None
        )
        # Factor of the gradients until `results`, 0-d on the device; None: 1.
        fp16 = plan.dtypes.dlogits == torch.float16
        self.scale = torch.full((), HIGHEST_SCALE, device=hidden.device) if fp16 else None

    def backward(
        self, spans: list[slice], coefficients: Tensor, entropy_coefficients: Tensor | None = None
    ) -> None:
        """Adds neighboring spans through which the head has gone forward, with dL/d(log-prob) of
        all their tokens, and dL/d(entropy) if that counts.
        """
        if not spans:
            return
        coefficients, entropy_coefficients = self.scaled_coefficients(
            coefficients, entropy_coefficients
        )
        first = spans[0].start
        # The last span's logits are still in their buffer.
        for span in reversed(spans):
            part = slice(span.start - first, span.stop - first)
            self.add(
                span,
                coefficients[part],
                None if entropy_coefficients is None else entropy_coefficients[part],
            )

    def scaled_coefficients(
        self, coefficients: Tensor, entropy_coefficients: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Further coefficients times the scale, which their size may lower: all gradients so far
        are brought to it.
        """
        if self.scale is None:
            return coefficients, entropy_coefficients
        given = coefficients[None]
        if entropy_coefficients is not None:
            given = torch.stack([coefficients, entropy_coefficients])
        if self.triton:
            self.scale, ratio, scaled = launch_lowered_scale(
                self.scale, given, LARGEST_SCALED, HIGHEST_SCALE
            )
        else:
            largest = given.abs().max() * self.chunked.steepest
            lowered = torch.minimum(
                torch.exp2(torch.floor(torch.log2(LARGEST_SCALED / largest))), self.scale
            )
            self.scale, ratio, scaled = lowered, lowered / self.scale, given * lowered
        gradients = [self.dlogits_buffer[: self.filled], self.dhidden, self.dweight, self.dbias]
        scale_in_place(gradients, ratio, triton=self.triton)
        return scaled[0], None if entropy_coefficients is None else scaled[1]

    def add(self, span: slice, coefficients: Tensor, entropy_coefficients: Tensor | None) -> None:
        """Computes a span's gradients of logits. Their products come at once where they are in
        place, else whenever the buffer is full.
        """
        chunked, begin = self.chunked, span.start
        rows = chunked.rows(span)
        if chunked.plan.in_place:
            chunked.write_dlogits(rows, span, coefficients, entropy_coefficients, rows.logits)
            chunked.resident = slice(chunked.resident.start, begin)
            flags = coefficients != 0
            if entropy_coefficients is not None:
                flags |= entropy_coefficients != 0
            dlogits, tokens = taking_part(rows.logits, span, flags)
            if self.dbias is not None:
                self.dbias += dlogits.sum(dim=0)
            self.multiply(
                rounded_in_place(dlogits, chunked.plan.dtypes.dlogits), tokens, last=False
            )
            return
        while begin < span.stop:
            if self.filled == len(self.dlogits_buffer):
                self.multiply_waiting(last=False)
            end = min(span.stop, begin + len(self.dlogits_buffer) - self.filled)
            part = slice(begin - span.start, end - span.start)
            given = coefficients[part]
            entropies = None if entropy_coefficients is None else entropy_coefficients[part]
            out = self.dlogits_buffer[
                self.filled : self.filled + end - begin, : rows.logits.shape[1]
            ]
            chunked.write_dlogits(
                rows.part(part), slice(begin, end), given, entropies, out, self.dbias
            )
            self.waiting.append(torch.arange(begin, end))
            self.filled += end - begin
            begin = end

    def multiply_waiting(self, *, last: bool) -> None:
        """The gradients' products over all tokens that wait. No token waits afterwards."""
        if not self.waiting:
            return
        dlogits = self.dlogits_buffer[: self.filled, : len(self.chunked.weight)]
        tokens = torch.cat(self.waiting)
        self.waiting, self.filled = [], 0
        # Neighbors are read and written in place.
        adjacent = bool((tokens.diff() == 1).all())
        index = (
            slice(int(tokens[0]), int(tokens[-1]) + 1)
            if adjacent
            else on_device(tokens, dlogits.device)
        )
        self.multiply(dlogits, index, last=last)

    def multiply(self, dlogits: Tensor, index: slice | Tensor, *, last: bool) -> None:
        """The gradients' products over the tokens of this index. last: whether none follow."""
        hidden, weight = self.chunked.gradient_operands
        if self.dhidden is not None and isinstance(index, slice):
            multiply(dlogits, weight, out=self.dhidden[index])
        elif self.dhidden is not None:
            product = self.dhidden.new_empty(len(dlogits), self.dhidden.shape[1])
            multiply(dlogits, weight, out=product)
            self.dhidden[index] = product
        if self.needs_weight:
            accumulate = self.dweight is not None
            if self.dweight is None:
                self.dweight = self.empty_dweight(weight, whole=last)
            multiply(dlogits.T, hidden[index], out=self.dweight, accumulate=accumulate)

    def empty_dweight(self, weight: Tensor, *, whole: bool) -> Tensor:
        """For the weight's gradient. whole: whether one product gives it, and no sum over fillings
        of the buffer.
        """
        dtype = self.dtypes[1]
        if dtype is None or not (whole and self.chunked.plan.dtypes.writes_gradient(dtype)):
            dtype = self.logits_dtype
        return torch.empty_like(weight, dtype=dtype, memory_format=torch.contiguous_format)

    def finish(self) -> None:
        """The last products, before `results`. Buffers are freed."""
        self.multiply_waiting(last=True)
        if self.chunked.plan.in_place:
            self.chunked.release()
        if self.needs_weight and self.dweight is None:
            self.dweight = torch.zeros_like(
                self.chunked.weight, memory_format=torch.contiguous_format
            )
        if self.dhidden is not None and self.chunked.head.shard is not None:
            self.chunked.head.shard.summed(self.dhidden)
        del self.chunked, self.dlogits_buffer

    def results(self, incoming: Tensor | None = None) -> list[Tensor | None]:
        """Gradients of hidden [N, D], weight [V, D] and bias [V] in their dtypes, None where not
        needed. incoming: 0-d, the gradient of the loss, which they are multiplied by; None: 1.
        """
        factor = incoming
        if self.scale is not None:
            factor = (1.0 if incoming is None else incoming) / self.scale
        gradients = list(zip((self.dhidden, self.dweight, self.dbias), self.dtypes, strict=True))
        if factor is not None:
            kept = [
                gradient
                for gradient, dtype in gradients
                if gradient is not None and gradient.dtype == dtype
            ]
            scale_in_place(kept, factor, triton=self.triton)
        return [converted(gradient, factor, dtype) for gradient, dtype in gradients]


# --- rows and scales ------------------------------------------------------------------------------


def taking_part(dlogits: Tensor, span: slice, flags: Tensor) -> tuple[Tensor, slice | Tensor]:
    """The rows of a span that have a gradient [k, V], and their tokens, where the host sees them
    without waiting. Rows from the end move to where a token has none.
    """
    if dlogits.is_cuda or (k := int(flags.sum())) == len(flags):
        return dlogits, span
    tokens = torch.arange(span.start, span.stop)
    target, source = (~flags[:k]).nonzero().squeeze(1), k + flags[k:].nonzero().squeeze(1)
    for moved, place in zip(source.split(ROWS_MOVED), target.split(ROWS_MOVED), strict=True):
        dlogits[place] = dlogits[moved]
    tokens[target] = tokens[source]
    return dlogits[:k], tokens[:k]


def rounded_in_place(values: Tensor, dtype: torch.dtype) -> Tensor:
    """values [k, V] in a narrower dtype, each row at the beginning of its own memory."""
    if values.dtype == dtype:
        return values
    narrow = values.view(dtype)[:, : values.shape[1]]
    for part, place in zip(values.split(ROWS_MOVED), narrow.split(ROWS_MOVED), strict=True):
        place.copy_(part.to(dtype))  # not at once: part and place overlap
    return narrow


def scale_in_place(tensors: Sequence[Tensor | None], factor: Tensor, *, triton: bool) -> None:
    """Multiplies tensors by a 0-d tensor. The host does not wait, and no byte moves where that is 1
    and Triton runs.
    """
    filled = [tensor for tensor in tensors if tensor is not None and tensor.numel()]
    if triton and filled:
        launch_scale(filled, factor)
        return
    for values in filled:
        # In place a half would round the number itself to half precision first.
        values.mul_(factor) if values.dtype == factor.dtype else values.copy_(
            values.to(factor.dtype) * factor
        )


def converted(
    values: Tensor | None, factor: Tensor | None, dtype: torch.dtype | None
) -> Tensor | None:
    """values times a 0-d tensor (None: 1), rounded once to another dtype. Values of that dtype stay
    as they are.
    """
    if values is None or dtype is None or values.dtype == dtype:
        return values
    return (
        values.to(dtype)
        if factor is None
        else torch.mul(values, factor, out=torch.empty_like(values, dtype=dtype))
    )
