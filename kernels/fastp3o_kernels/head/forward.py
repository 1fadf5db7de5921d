"""The head applied in spans that fit a memory budget: hidden states -> log-probs.

N tokens, n of them in a span, D hidden size, V vocabulary, F = N V D. The logits cost one matrix
product, 2 F operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels.head import scratch
from fastp3o_kernels.head.chunks import HeadPlan
from fastp3o_kernels.head.head import Head, multiply, sums_in_fp32
from fastp3o_kernels.operation import HAS_TRITON
from fastp3o_kernels.rows import eager
from fastp3o_kernels.rows.rows import Rows

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import (
        launch_dlogits,
        launch_logprobs,
        launch_statistics,
    )


class ChunkedHead:
    """One evaluation of the head over N tokens with these labels.

    logprobs, and unless exponentials take the logits' place row_max and log_sum: [N], filled in
    span by span, and of the whole vocabulary where the head is a shard. statistics: entropy,
    mean_logit and is_top, [N] each and likewise, or nothing. One buffer has the logits of the
    tokens `resident`.

    keeps: whether logits stay for the backward pass where their gradients take their place: of the
    last tokens, as many as memory that stays between calls has room for. More would cost fresh
    pages in every call, for about as long as the product takes again. exponentials: whether e^(x −
    max) may take the place of logits. differentiable: whether the gradients of what is computed are
    wanted.
    """

    differentiable = False

    def __init__(
        self,
        labels: Tensor,
        ignore_index: int,
        plan: HeadPlan,
        *,
        triton: bool,
        statistics: bool = False,
        keeps: bool = False,
        exponentials: bool = True,
    ):
        self.labels, self.ignore_index, self.plan, self.triton = labels, ignore_index, plan, triton
        self.takes_exponentials = exponentials and plan.in_place and not statistics
        N = len(labels)
        on_device: dict[str, Any] = {"dtype": plan.dtypes.logits, "device": labels.device}
        self.keeps, self.rows_held = keeps and plan.in_place, plan.logits_rows
        if self.keeps:
            kept = scratch.MOST_BYTES // (plan.row_elements * plan.dtypes.logits.itemsize)
            self.rows_held = max(min(plan.dlogits_rows, kept), plan.logits_rows)
        self.logits_buffer: Tensor | None = None
        self.resident = slice(0, 0)
        # Whether e^(x − max) take the logits' place at once, and their sums, [N].
        self.exponential = False
        self.sums: Tensor = torch.empty(N, **on_device)
        self.steepest: float | Tensor = 1.0  # bound of d log-prob / d logit
        self.logprobs, self.row_max, self.log_sum = (torch.empty(N, **on_device) for _ in range(3))
        dtypes = (plan.dtypes.logits, plan.dtypes.logits, torch.bool) if statistics else ()
        self.statistics = tuple(
            torch.empty(N, dtype=dtype, device=labels.device) for dtype in dtypes
        )

    @contextmanager
    def holding(self, hidden: Tensor, head: Head) -> Iterator[None]:
        """Inside, logits of these hidden states [N, D] can be computed. Outside, only autograd
        keeps them.
        """
        # The dtypes have taken autocast into account.
        with torch.autocast(hidden.device.type, enabled=False), sums_in_fp32(hidden.device):
            dtypes = self.plan.dtypes
            self.head = head
            self.hidden = dtypes.cast(hidden)
            self.weight = dtypes.cast(head.weight)
            self.gradient_operands = self.hidden, self.weight
            if dtypes.dlogits != dtypes.multiplied:
                self.gradient_operands = hidden.to(dtypes.dlogits), head.weight.to(dtypes.dlogits)
            self.exponential = (
                self.takes_exponentials and head.softcap is None and head.shard is None
            )
            try:
                yield
            finally:
                del self.head, self.hidden, self.weight, self.gradient_operands

    def release(self) -> None:
        """Gives the buffer back to the next call."""
        if self.logits_buffer is not None:
            scratch.give_back(self.logits_buffer)
        self.logits_buffer, self.resident = None, slice(0, 0)

    def rows(self, span: slice) -> Rows:
        """Products of a span [n, V] before the transform, which kernels apply when they read them;
        or exponentials.
        """
        resident, plan = self.resident, self.plan
        if self.logits_buffer is None:
            size = self.rows_held * plan.row_elements
            taken = scratch.take(size, dtype=plan.dtypes.logits, device=self.labels.device)
            self.logits_buffer = taken.view(self.rows_held, plan.row_elements)
        held = resident.start <= span.start and span.stop <= resident.stop
        if not held:
            # With all that come after it.
            fits = len(self.labels) - resident.start <= self.rows_held
            follows = self.keeps and span.start == resident.stop and fits
            self.resident = resident = slice(resident.start if follows else span.start, span.stop)
        first = span.start - resident.start
        logits = self.logits_buffer[first : first + span.stop - span.start, : len(self.weight)]
        rows = Rows(logits, self.labels[span], self.head, self.ignore_index)
        if (shard := self.head.shard) is not None:  # where labels are counted from its first row
            rows = rows._replace(
                labels=rows.labels - shard.first, ignore_index=self.ignore_index - shard.first
            )
        if not held:
            multiply(self.hidden[span], self.weight.T, out=logits)
            if self.exponential:
                self.logprobs[span], self.sums[span] = eager.exponentials_in_place(rows)
        return rows

    def forward(self, span: slice) -> None:
        """Fills in the log-probs of a span, and its statistics."""
        rows, shard = self.rows(span), self.head.shard
        if self.exponential:  # `rows` has filled in the log-probs
            return
        numbers = launch_logprobs(rows) if self.triton else eager.logprobs_in_parts(rows)
        if shard is not None:
            numbers = shard.whole_logprobs(rows, *numbers)
        self.logprobs[span], self.row_max[span], self.log_sum[span] = numbers
        if not self.statistics:
            return
        statistics = (launch_statistics if self.triton else eager.statistics_in_parts)(
            rows, *numbers[1:]
        )
        if shard is not None:
            statistics = shard.whole_statistics(*statistics)
        for all_tokens, values in zip(self.statistics, statistics, strict=True):
            all_tokens[span] = values

    def write_dlogits(
        self,
        rows: Rows,
        tokens: slice,
        coefficients: Tensor,
        entropy_coefficients: Tensor | None,
        out: Tensor,
        dbias: Tensor | None = None,
    ) -> None:
        """out [n, V] = the gradients of rows within `resident`, given dL/d(log-prob) and
        dL/d(entropy). dbias: [V], which their sum is added to before they are rounded, where they
        have another place than the logits.
        """
        if self.exponential:
            eager.dlogits_of_exponentials(rows, coefficients, self.sums[tokens])
            return
        entropy = self.statistics[0][tokens] if self.statistics else None
        write = launch_dlogits if self.triton else eager.dlogits
        numbers = self.row_max[tokens], self.log_sum[tokens], coefficients
        write(rows, *numbers, out, entropy, entropy_coefficients, dbias)
