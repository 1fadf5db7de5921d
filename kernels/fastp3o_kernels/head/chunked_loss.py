"""The chunk loop: hidden states -> logits -> log-probs -> coefficients -> gradients, never all
logits at once.

The coefficient dL/d log π of a token depends only on its own group (a prompt's responses; a chosen
and a rejected; one response). So a chunk of whole groups goes all the way before the next: three
matrix products in all, where a loss that needs every log-prob first computes the logits twice.

N tokens, n tokens of a chunk, D hidden size, V vocabulary, F = N V D.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from fastp3o_kernels.head.chunks import Chunk
from fastp3o_kernels.head.forward import ChunkedHead
from fastp3o_kernels.head.head import Head
from fastp3o_kernels.head.one_pass import chunked_head, gradients_of
from fastp3o_kernels.operation import first_derivatives_only
from fastp3o_kernels.rows.rows import NO_LABEL


class ChunkLoss(Protocol):
    """A loss as the loop uses it, chunk by chunk and at the end."""

    outputs: Collection[str]  # statistics of the head that it needs, too

    def evaluate(self, chunked: ChunkedHead, chunk: Chunk) -> None:
        """Takes note of a chunk's log-probs if no gradient is wanted."""

    def coefficients(self, chunked: ChunkedHead, chunk: Chunk) -> tuple[Tensor, Tensor | None]:
        """The same, and dL/d(log-prob) of a chunk's tokens [n], and dL/d(entropy) if that counts."""

    def total(self, chunked: ChunkedHead) -> Tensor:
        """The loss of all chunks, 0-d."""


class ChunkedLoss(torch.autograd.Function):
    """Forward 2 F operations, and 2 F for each gradient; backward multiplies them by the incoming
    gradient. weight, bias: the head's own, which autograd sees only as arguments.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, chunked, loss):
        needs = ctx.needs_input_grad[:3]
        chunked.differentiable = any(needs)
        with chunked.holding(hidden, head):
            gradients = gradients_of(chunked, hidden, head, needs) if any(needs) else None
            for chunk in chunked.plan.chunks:
                for span in chunk.spans:
                    chunked.forward(span)
                if gradients is None:
                    loss.evaluate(chunked, chunk)
                else:
                    gradients.backward(chunk.spans, *loss.coefficients(chunked, chunk))
            if gradients is not None:
                gradients.finish()
            else:
                chunked.release()
        ctx.gradients = gradients
        return loss.total(chunked)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients were handed out by the first backward pass; call the loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.results(grad_loss), *[None] * 3


def chunked_loss(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    bounds: list[int],
    loss: ChunkLoss,
    memory_budget: int | None,
    *,
    triton: bool,
    logprobs_out: Tensor | None,
) -> Tensor:
    """hidden [N, D], labels [N] -> the loss, 0-d; its gradient reaches hidden states, weight and
    bias. bounds: where the groups begin and the last one ends, [P + 1]. logprobs_out: [N], which
    gets the tokens' log-probs, or None.
    """
    given = {"triton": triton, "statistics": bool(loss.outputs)}
    chunked = chunked_head(
        hidden, head, labels.contiguous(), NO_LABEL, bounds, memory_budget, **given
    )
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    value = ChunkedLoss.apply(hidden, head.weight, head.bias, head, chunked, loss)
    if logprobs_out is not None:
        logprobs_out.copy_(chunked.logprobs)
    return value
