"""The chunked head where kernels read logits once, and write the gradient's exponentials as they
read them.

A row of the gradient of logits is a factor times exponentials that need no coefficient
(`rows/exponentials_kernel.py`). So they are written before coefficients are known, the buffer for
logits is short, and whole groups need only fit the exponentials. The factors multiply rows of the
products: dX = f (E W), dW = Eᵀ (f X).

Not for a bias, whose gradient is a sum of fp32 logits' gradients, for an entropy's gradient, which
is no such factor, and for shards, whose rows have their sums in several processes.

N tokens, n tokens of a span, D hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels.head.backward import (
    HIGHEST_SCALE,
    LARGEST_SCALED,
    HeadGradients,
    scale_in_place,
)
from fastp3o_kernels.head.chunks import budget_on, plan_chunks
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.head import Head, HeadDtypes, multiply
from fastp3o_kernels.operation import HAS_TRITON
from fastp3o_kernels.rows.rows import Rows

if HAS_TRITON:
    from fastp3o_kernels.head.scale_kernel import launch_lowered_scale
    from fastp3o_kernels.rows.exponentials_kernel import launch_exponentials


class OnePassHead(ChunkedHead):
    """As `ChunkedHead`. Exponentials of the span `resident` are in a buffer if `differentiable`,
    and wait there for their products; sums: of their rows, [N].
    """

    exponentials: Tensor | None = None

    def forward(self, span: slice) -> None:
        """Fills in the log-probs of a span and the sums of its exponentials."""
        plan, V = self.plan, len(self.weight)
        if self.exponentials is None:
            held = plan.dlogits_rows if self.differentiable else 1
            self.exponentials = self.sums.new_empty(
                held, plan.row_elements, dtype=plan.dtypes.dlogits
            )
        if self.logits_buffer is None:
            self.logits_buffer = self.sums.new_empty(plan.logits_rows, plan.row_elements)
        for piece in plan.pieces(span):
            logits = self.logits_buffer[: piece.stop - piece.start, :V]
            multiply(self.hidden[piece], self.weight.T, out=logits)
            first = piece.start - span.start if self.differentiable else 0
            out = self.exponentials[first : first + len(logits), :V]
            rows = Rows(logits, self.labels[piece], self.head, self.ignore_index)
            self.logprobs[piece], self.sums[piece] = launch_exponentials(
                rows, out, writes=self.differentiable
            )
        self.resident = span

    def release(self) -> None:
        self.logits_buffer = self.exponentials = None
        self.resident = slice(0, 0)


class OnePassGradients(HeadGradients):
    """As `HeadGradients`, of a `OnePassHead`."""

    chunked: OnePassHead

    def __init__(
        self, chunked: OnePassHead, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool]
    ):
        super().__init__(chunked, hidden, head, needs)
        # fp16 ends early: a row's factor multiplies hidden states up to this size.
        self.largest = (
            None
            if self.scale is None
            else torch.linalg.vector_norm(hidden, float("inf"), dtype=torch.float32)
        )

    def backward(
        self, spans: list[slice], coefficients: Tensor, entropy_coefficients: Tensor | None = None
    ) -> None:
        assert entropy_coefficients is None
        # The last span's exponentials are still in their buffer.
        for span in reversed(spans):
            if self.chunked.resident != span:
                self.chunked.forward(span)
            first = span.start - spans[0].start
            self.multiply_span(span, coefficients[first : first + span.stop - span.start])

    def multiply_span(self, span: slice, coefficients: Tensor) -> None:
        """The gradients' products of the span whose exponentials are in their buffer."""
        chunked = self.chunked
        assert chunked.exponentials is not None
        chunked.logits_buffer = None  # the products' operands take its memory
        hidden, weight = chunked.gradient_operands
        E = chunked.exponentials[: span.stop - span.start, : len(weight)]
        factors = coefficients / (-chunked.head.temperature * chunked.sums[span])
        factors.masked_fill_(coefficients == 0, 0.0)  # sums may be NaN
        factors = self.scaled_factors(factors, coefficients).unsqueeze(1)
        if self.dhidden is not None:
            # In fp32, which the exponentials' range needs, and so that a gradient is rounded once.
            product = self.dhidden.new_empty(len(E), weight.shape[1], dtype=self.logits_dtype)
            multiply(E, weight, out=product)
            torch.mul(product, factors, out=self.dhidden[span])
            del product
        if self.needs_weight:
            scaled = torch.mul(hidden[span], factors, out=torch.empty_like(hidden[span]))
            accumulate = self.dweight is not None
            if self.dweight is None:
                self.dweight = self.empty_dweight(weight, whole=chunked.plan.fillings == [len(E)])
            multiply(E.T, scaled, out=self.dweight, accumulate=accumulate)

    def scaled_factors(self, factors: Tensor, coefficients: Tensor) -> Tensor:
        """Factors [n] times the scale, which their size and that of the gradients of logits may
        lower.
        """
        if self.scale is None or self.largest is None:
            return factors
        # Of the scaled hidden states, and of gradients of hidden states by a weight of 1.
        sizes = torch.stack([factors * self.largest, coefficients])
        self.scale, ratio, _ = launch_lowered_scale(
            self.scale, sizes, LARGEST_SCALED, HIGHEST_SCALE
        )
        scale_in_place([self.dhidden, self.dweight], ratio, triton=True)
        return factors * self.scale

    def finish(self) -> None:
        self.chunked.release()
        super().finish()


def chunked_head(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    ignore_index: int,
    bounds: list[int],
    memory_budget: int | None,
    *,
    triton: bool,
    statistics: bool,
    keeps: bool = False,
) -> ChunkedHead:
    """The head of these hidden states [N, D] and labels [N] with its plan, in one pass where that
    serves. It depends on nothing that two evaluations of the same tokens differ in. bounds: of the
    groups. keeps: as `ChunkedHead` has it.
    """
    dtypes, budget = HeadDtypes.for_hidden(hidden), budget_on(hidden.device, memory_budget)
    one_pass = triton and head.bias is None and head.shard is None and not statistics
    given: dict[str, Any] = {
        "triton": triton,
        "sum_bytes": dtypes.sum_bytes(head),
        "one_pass": one_pass,
    }
    plan = plan_chunks(bounds, head.widest, dtypes, budget, **given)
    kind = OnePassHead if one_pass else ChunkedHead
    return kind(labels, ignore_index, plan, triton=triton, statistics=statistics, keeps=keeps)


def gradients_of(
    chunked: ChunkedHead, hidden: Tensor, head: Head, needs: tuple[bool, bool, bool]
) -> HeadGradients:
    if isinstance(chunked, OnePassHead):
        return OnePassGradients(chunked, hidden, head, needs)
    return HeadGradients(chunked, hidden, head, needs)
