"""Tokens whose gradients of logits wait in a buffer for their matrix products."""

import torch
from torch import Tensor

# Rows of the buffer that move at once, by way of a copy that the budget does not hold.
ROWS_MOVED = 32

Moves = list[tuple[Tensor, Tensor]]


class WaitingTokens:
    """Which tokens wait, each with a row of the buffer, and which of them have a coefficient.

    The host asks for the latter when the buffer is full, by flags that were sent when each span came. The device then
    has a later span's logits to work on, so neither waits for the other.
    """

    def __init__(self):
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
