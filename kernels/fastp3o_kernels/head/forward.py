"""The head applied in spans that fit a memory budget: hidden states -> log-probs.

N tokens, n of them in a span, D hidden size, V vocabulary, F = N V D. The logits cost one matrix product, 2 F
operations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels.dispatch import HAS_TRITON
from fastp3o_kernels.head.chunks import HeadPlan
from fastp3o_kernels.head.dtypes import multiply
from fastp3o_kernels.head.head import Head
from fastp3o_kernels.rows import in_torch

if HAS_TRITON:
    from fastp3o_kernels.rows.logits_kernel import launch_logprobs
    from fastp3o_kernels.rows.statistics_kernel import launch_statistics


class ChunkedHead:
    """One evaluation of the head over N tokens with these labels.

    logprobs, and with Triton row_max and log_sum: [N], filled in span by span. One buffer has the logits of the span
    `resident`.

    statistics: whether entropy, mean_logit and is_top [N] are filled in beside them.
    """

    def __init__(self, labels: Tensor, ignore_index: int, plan: HeadPlan, *, triton: bool, statistics: bool = False):
        self.labels, self.ignore_index, self.plan, self.triton = labels, ignore_index, plan, triton
        self.with_statistics = statistics
        on_device: dict[str, Any] = {"dtype": plan.dtypes.logits, "device": labels.device}
        self.logits_buffer = torch.empty(plan.logits_rows, plan.row_elements, **on_device)
        self.resident: slice | None = None
        self.logprobs, self.row_max, self.log_sum = (torch.empty(len(labels), **on_device) for _ in range(3))
        if statistics:
            self.entropy, self.mean_logit = (torch.empty(len(labels), **on_device) for _ in range(2))
            self.is_top = torch.empty(len(labels), dtype=torch.bool, device=labels.device)

    @contextmanager
    def holding(self, hidden: Tensor, head: Head) -> Iterator[None]:
        """Within, logits of these hidden states [N, D] can be computed. Outside they are left to autograd to keep."""
        # The dtypes have taken autocast into account.
        with torch.autocast(hidden.device.type, enabled=False):
            cast = self.plan.dtypes.cast
            self.head, self.hidden, self.weight = head, cast(hidden), cast(head.weight)
            try:
                yield
            finally:
                del self.head, self.hidden, self.weight

    def logits(self, span: slice) -> Tensor:
        """Bare products of a span [n, V], which are transformed where they are read."""
        logits = self.logits_buffer[: span.stop - span.start, : self.plan.V]
        if span != self.resident:
            multiply(self.hidden[span], self.weight.T, out=logits)
            self.resident = span
        return logits

    def forward(self, span: slice) -> None:
        """Fills in the log-probs of a span."""
        logits, labels = self.logits(span), self.labels[span]
        if self.triton:
            results = launch_logprobs(logits, labels, self.head, self.ignore_index)
            self.logprobs[span], self.row_max[span], self.log_sum[span] = results
        else:
            self.logprobs[span] = in_torch.logprobs(logits, labels, self.head, self.ignore_index)
        if self.with_statistics:
            self.entropy[span], self.mean_logit[span], self.is_top[span] = self.statistics(span, logits, labels)

    def statistics(self, span: slice, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.triton:
            known = self.row_max[span], self.log_sum[span]
            return launch_statistics(logits, labels, *known, self.head, self.ignore_index)
        return in_torch.statistics(logits, labels, self.head, self.ignore_index)
