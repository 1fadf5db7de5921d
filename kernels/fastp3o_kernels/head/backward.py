"""The way back through the chunked head: dL/d(log-prob) of each row -> gradients of hidden states, weight and bias.

Gradients of logits wait in a buffer for their products until it is full, longer than the one for logits: the weight's
gradient is read and written once for each filling, and small chunks would spend their time on that. Rows whose
coefficient is zero (clipped pairs, pairs of equal advantage, ignored labels) are left out of the products.

N rows, D hidden size, V vocabulary, F = N V D. Each gradient costs 2 F operations.
"""

import torch
from torch import Tensor

from fastp3o_kernels.head.forward import ChunkedHead, multiply
from fastp3o_kernels.head.gradient_scaling import scaled
from fastp3o_kernels.rows import in_torch as torch_rows
from fastp3o_kernels.rows.on_policy import launch_on_policy
from fastp3o_kernels.rows.token_logprobs import launch_dlogits

# Rows that move within the buffer at once, by way of a copy that the budget does not hold.
ROWS_MOVED = 32


class HeadGradients:
    """Gradients of one evaluation of the head. `needs` says whether hidden, weight and bias get one.

    hidden, weight, bias: the caller's tensors, of which only the dtypes and shapes count here.
    """

    def __init__(
        self,
        head: ChunkedHead,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: tuple[bool, bool, bool],
    ):
        self.head, self.waiting = head, WaitingRows()
        self.dtypes = [tensor.dtype if tensor is not None else None for tensor in (hidden, weight, bias)]
        needs_hidden, self.needs_weight, needs_bias = needs
        chunks, products = head.chunks, head.products
        self.dlogits_buffer = hidden.new_empty(chunks.dlogits_rows, chunks.row_elements, dtype=products.scratch)
        self.dhidden = torch.zeros_like(hidden, memory_format=torch.contiguous_format) if needs_hidden else None
        self.dweight: Tensor | None = None
        self.dbias = hidden.new_zeros(len(weight), dtype=products.logits) if needs_bias else None

    def backward(self, rows: slice, coefficients: Tensor) -> None:
        """Takes a piece through which `forward` has gone, with dL/d(log-prob) of its rows [n]."""
        head, out = self.head, self.room_for(rows, coefficients)
        logits, labels, settings = head.logits(rows), head.labels[rows], (head.transform, head.ignore_index)
        if head.triton:
            row_max, log_sum = head.row_max[rows], head.log_sum[rows]
            launch_dlogits(logits, labels, row_max, log_sum, coefficients, None, *settings, out=out)
        else:
            torch_rows.dlogits(logits, labels, coefficients, *settings, out=out)

    def on_policy(self, rows: slice, coefficients: Tensor) -> None:
        """Forward and backward of a piece at once."""
        if not self.head.triton:
            self.head.forward(rows)
            self.backward(rows, coefficients)
            return
        out = self.room_for(rows, coefficients)
        logits, labels = self.head.logits(rows), self.head.labels[rows]
        launch_on_policy(logits, labels, coefficients, None, self.head.transform, out=out)

    def room_for(self, rows: slice, coefficients: Tensor) -> Tensor:
        """The part of the buffer for the gradient of a piece's logits, [n, V]."""
        if self.waiting.number + rows.stop - rows.start > len(self.dlogits_buffer):
            self.multiply_waiting(last=False)
        begin = self.waiting.number
        self.waiting.add(rows, coefficients)
        return self.dlogits_buffer[begin : self.waiting.number, : self.head.vocabulary]

    def multiply_waiting(self, *, last: bool) -> None:
        """The gradients' products over all rows that wait and have a coefficient."""
        rows, moves = self.waiting.take()
        if len(rows) == 0:
            return
        for source, target in moves:
            self.dlogits_buffer[target.to(self.dlogits_buffer.device)] = self.dlogits_buffer[
                source.to(self.dlogits_buffer.device)
            ]
        dlogits = self.dlogits_buffer[: len(rows), : self.head.vocabulary]
        adjacent = bool((rows.diff() == 1).all())
        index = slice(int(rows[0]), int(rows[-1]) + 1) if adjacent else rows.to(dlogits.device)
        if self.dhidden is not None:
            of_rows = self.dhidden[index] if adjacent else self.dhidden.new_empty(len(rows), self.dhidden.shape[1])
            multiply(dlogits, self.head.weight, out=of_rows)
            if not adjacent:
                self.dhidden[index] = of_rows
        if self.needs_weight:
            accumulate = self.dweight is not None
            if not accumulate:
                self.dweight = torch.empty_like(
                    self.head.weight, dtype=self.weight_sum_dtype(last), memory_format=torch.contiguous_format
                )
            multiply(dlogits.T, self.head.hidden[index], out=self.dweight, accumulate=accumulate)
        if self.dbias is not None:
            self.dbias += dlogits.sum(dim=0, dtype=self.dbias.dtype)

    def weight_sum_dtype(self, only: bool) -> torch.dtype:
        """fp32 where several fillings of the buffer are summed; a single product's own sum is fp32 inside already."""
        bf16 = self.dtypes[1] == self.head.products.scratch == torch.bfloat16
        return torch.bfloat16 if only and bf16 else self.head.products.logits

    def times(self, factor: Tensor) -> list[Tensor | None]:
        """All gradients so far, times a 0-d tensor: of hidden [N, D], weight [V, D] and bias [V], in their dtypes."""
        self.finish()
        return [
            None if gradient is None else scaled(gradient, factor, dtype, triton_kernels=self.head.triton)
            for gradient, dtype in zip((self.dhidden, self.dweight, self.dbias), self.dtypes, strict=True)
        ]

    def finish(self) -> None:
        """The last products; the buffer and all that only they need are given up."""
        if self.dlogits_buffer is None:
            return
        self.multiply_waiting(last=True)
        if self.needs_weight and self.dweight is None:
            self.dweight = torch.zeros_like(self.head.weight, memory_format=torch.contiguous_format)
        self.dlogits_buffer = None


class WaitingRows:
    """Which rows wait for their products, and which of them have a coefficient.

    The host asks for the latter when the buffer is full, by flags that were sent when each piece came. The device then
    has a later piece's logits to work on, so neither waits for the other.
    """

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.number = 0
        self.rows: list[Tensor] = []
        self.flags: list[Tensor] = []
        self.sent: torch.cuda.Event | None = None

    def add(self, rows: slice, coefficients: Tensor) -> None:
        self.number += rows.stop - rows.start
        self.rows.append(torch.arange(rows.start, rows.stop))
        self.flags.append((coefficients != 0).to("cpu", non_blocking=True))
        if coefficients.is_cuda:
            self.sent = torch.cuda.Event()
            self.sent.record(torch.cuda.current_stream(coefficients.device))

    def take(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """The k rows with a coefficient, in the order of their places in the buffer after moves (from, to).

        Rows from its end move into the places of rows without a coefficient, so that the first k places hold the rest.
        """
        if self.number == 0:
            return torch.empty(0, dtype=torch.long), []
        if self.sent is not None:
            self.sent.synchronize()
        rows, kept = torch.cat(self.rows), torch.cat(self.flags)
        self.clear()
        k = int(kept.sum())
        target = (~kept[:k]).nonzero().squeeze(1)
        source = k + kept[k:].nonzero().squeeze(1)
        rows[target] = rows[source]
        moves = zip(source.split(ROWS_MOVED), target.split(ROWS_MOVED), strict=True) if len(source) else []
        return rows[:k], list(moves)
