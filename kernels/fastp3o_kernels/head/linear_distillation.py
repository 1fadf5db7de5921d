"""Hidden states and heads of a student and a teacher -> divergences of their distributions, never
all logits at once.

N tokens, n of them in a part, D and D' hidden sizes, V vocabulary. s, t: log-probs [n, V] of
student and teacher.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from math import log, log1p
from typing import Any

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_same_device
from fastp3o_kernels.head.chunks import HeadPlan, budget_on, plan_chunks
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.fsdp import reduced
from fastp3o_kernels.head.head import Head, HeadDtypes, HeadLike, check_head
from fastp3o_kernels.head.linear_logprobs import LinearLogprobs
from fastp3o_kernels.operation import graph_break
from fastp3o_kernels.rows.eager import ROWS_AT_ONCE
from fastp3o_kernels.rows.rows import NO_LABEL, Rows, slope, transformed

DIVERGENCES = ("reverse_kl", "forward_kl", "jsd")


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL of log-probs [n, V] -> [n]. What a gives no probability counts as 0, also where b gives
    none.
    """
    p = a.exp()
    return p.mul_((a - b).masked_fill_(p == 0, 0.0)).sum(1)


def mixture(s: Tensor, t: Tensor, beta: float) -> Tensor:
    return torch.logaddexp(t + log(beta), s + log1p(-beta))


def divergences(s: Tensor, t: Tensor, divergence: str, beta: float) -> Tensor:
    if divergence != "jsd":
        return kl(s, t) if divergence == "reverse_kl" else kl(t, s)
    m = mixture(s, t, beta)
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def student_gradients(s: Tensor, t: Tensor, divergence: str, beta: float) -> Tensor:
    """d divergence / d the student's logits after their transform, [n, V]."""
    p = s.exp()
    if divergence == "forward_kl":
        return p.sub_(t.exp())
    target, weight = (t, 1.0) if divergence == "reverse_kl" else (mixture(s, t, beta), 1 - beta)
    ratios = (s - target).masked_fill_(p == 0, 0.0)
    # Or the digits of a token of probability near 1 would cancel.
    ratios -= ratios.gather(1, p.argmax(1, keepdim=True))
    return ratios.sub_((p * ratios).sum(1, keepdim=True)).mul_(p).mul_(weight)


class DistilledHead(ChunkedHead):
    """The student's head, and a teacher's with logits of the same spans. `logprobs` has the
    divergences.
    """

    def __init__(
        self, plan: HeadPlan, labels: Tensor, teacher_hidden: Tensor, teacher_head: Head, *kind: Any
    ):
        super().__init__(labels, NO_LABEL, plan, triton=False, exponentials=False)
        teacher_plan = plan._replace(dtypes=HeadDtypes.for_hidden(teacher_hidden))
        self.teacher = ChunkedHead(labels, NO_LABEL, teacher_plan, triton=False, exponentials=False)
        self.kind = kind
        self.teacher_hidden, self.teacher_head = teacher_hidden, teacher_head
        self.versions = self.teacher_versions()

    def teacher_versions(self) -> list[int]:
        tensors = self.teacher_hidden, self.teacher_head.weight, self.teacher_head.bias
        return [
            tensor._version
            for tensor in tensors
            if tensor is not None and not tensor.is_inference()
        ]

    @contextmanager
    def holding(self, hidden: Tensor, head: Head) -> Iterator[None]:
        if self.versions != self.teacher_versions():  # which autograd does not see
            raise RuntimeError(
                "the teacher's tensors were modified by an inplace operation before the backward pass"
            )
        with (
            super().holding(hidden, head),
            self.teacher.holding(self.teacher_hidden, self.teacher_head),
        ):
            yield

    def parts(self, rows: Rows, tokens: slice) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """s and t of a few rows at a time. tokens: of these rows, within the span `resident`."""
        span = self.resident or tokens
        teacher = self.teacher.rows(span).part(
            slice(tokens.start - span.start, tokens.stop - span.start)
        )
        for first in range(0, len(rows.logits), ROWS_AT_ONCE):
            part = slice(first, first + ROWS_AT_ONCE)
            s, t = (transformed(both.logits[part], both.transform) for both in (rows, teacher))
            yield part, s.log_softmax(1), t.to(s.dtype).log_softmax(1)

    def forward(self, span: slice) -> None:
        for part, s, t in self.parts(self.rows(span), span):
            self.logprobs[span][part] = divergences(s, t, *self.kind)
        if self.kind[0] == "reverse_kl":  # the others' gradients are at most 2
            self.steepest = (1 + self.logprobs[span].nan_to_num(posinf=0.0).amax()).clamp(
                min=self.steepest
            )

    def write_dlogits(
        self,
        rows: Rows,
        tokens: slice,
        coefficients: Tensor,
        entropy_coefficients: Tensor | None,
        out: Tensor,
        dbias: Tensor | None = None,
    ) -> None:
        nothing = coefficients[:, None] == 0  # times what may be NaN
        for part, s, t in self.parts(rows, tokens):
            gradient = student_gradients(s, t, *self.kind).mul_(coefficients[part, None])
            gradient.mul_(slope(rows.logits[part], rows.transform)).masked_fill_(nothing[part], 0.0)
            out[part] = gradient
            if dbias is not None:
                dbias += gradient.sum(0)


@graph_break
def linear_distillation(
    hidden: Tensor,
    head: HeadLike,
    teacher_hidden: Tensor,
    teacher_head: HeadLike,
    *,
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    memory_budget: int | None = None,
) -> Tensor:
    """The divergence between a student's and a teacher's distribution over the vocabulary, p and q,
    at each token.

    "reverse_kl": KL(p ‖ q). "forward_kl": KL(q ‖ p). "jsd", of GKD (arXiv 2306.13649): β KL(q ‖ m)
    + (1 − β) KL(p ‖ m), m = β q + (1 − β) p; near β = 0 it is β times the forward KL, near β = 1 it
    is 1 − β times the reverse one.

    Args:
        hidden, head: of the student, as in `linear_logprobs`; they get gradients.
        teacher_hidden: [N, D'], the teacher's hidden states that predict the same tokens.
        teacher_head: its Head with a weight [V, D'] of that dtype, an `nn.Linear`, or the bare
            weight; both are constants.
        divergence, beta: see above; beta, above 0 and below 1, counts for "jsd" alone.
        memory_budget: bytes of scratch for the logits of both and the student's gradient, as in
            `linear_logprobs`.

    Returns:
        [N] fp32 (fp64 for an fp64 student); inf where a logit of -inf excludes from a KL's second
            distribution what its
        first one draws. The gradient of such a reverse KL is NaN.

    Raises:
        ValueError: for tensors that disagree, another divergence or beta, and a budget that holds
            no row of logits.
        RuntimeError: in the backward pass, if the teacher's tensors were changed in place before
            it.
    """
    head = Head.from_layer(head)
    teacher_head = Head.from_layer(teacher_head)
    teacher_hidden = teacher_hidden.detach()
    for name, student, teacher in (
        ("tokens", hidden, teacher_hidden),
        ("vocabulary", head.weight, teacher_head.weight),
    ):
        if student.shape[:1] != teacher.shape[:1]:
            raise ValueError(
                f"teacher and student must share the {name}: {list(teacher.shape)}, {list(student.shape)}"
            )
    if head.shard is not None or teacher_head.shard is not None:
        raise ValueError("linear_distillation takes whole heads, and got a shard of one")
    if divergence not in DIVERGENCES or not 0 < beta < 1:
        expected = f"one of {', '.join(DIVERGENCES)}, and beta above 0 and below 1"
        raise ValueError(f"divergence must be {expected}, got {divergence!r} and {beta}")
    # No divergence reads labels.
    labels = torch.zeros(hidden.shape[:1], dtype=torch.long, device=hidden.device)
    check_head(hidden, head, labels, None)
    head = reduced(head)
    check_same_device(hidden=hidden, teacher_hidden=teacher_hidden)
    try:
        check_head(teacher_hidden, teacher_head.detach(), labels, None)
    except ValueError as error:
        raise ValueError(f"the teacher's {error}") from None
    bounds, V, dtypes = [0, len(hidden)], len(head.weight), HeadDtypes.for_hidden(hidden)
    budget = budget_on(hidden.device, memory_budget)
    plan = plan_chunks(
        bounds, V, dtypes, budget, HeadDtypes.for_hidden(teacher_hidden), triton=False
    )
    chunked = DistilledHead(plan, labels, teacher_hidden, teacher_head.detach(), divergence, beta)
    return LinearLogprobs.apply(hidden, head.weight, head.bias, labels, head, chunked)[0]
