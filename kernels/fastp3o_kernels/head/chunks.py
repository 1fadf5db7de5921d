"""A memory budget -> the rows of hidden states that go through the head together.

N rows, V vocabulary. A unit is what must not be divided for a coefficient to be known: a pair.
"""

from itertools import pairwise
from typing import NamedTuple

# Bytes of scratch for logits and their gradient. The larger, the fewer times the weight's gradient is read and written:
# once per full gradient buffer, so budget / V matters. benchmarks/NOTES.md says what is known of the choice.
MEMORY_BUDGET = 960_000_000

# Rows of both buffers begin at a multiple of this many elements, whatever the vocabulary: matrix products and kernels
# then read them in their widest loads.
ALIGNMENT = 16


class Chunks(NamedTuple):
    """How rows go through the head.

    logits_rows: of the buffer for logits.
    dlogits_rows: of the buffer where gradients of logits wait for their products.
    row_elements: V, aligned.
    chunks: each is a list of pieces (slices of rows). A chunk is whole units. It is one piece unless a unit is larger
        than the buffer; the last piece then fills the buffer, where its logits stay for the backward products, and the
        others' are computed twice.
    """

    logits_rows: int
    dlogits_rows: int
    row_elements: int
    chunks: list[list[slice]]


def plan_chunks(bounds: list[int], V: int, logits_bytes: int, dlogits_bytes: int, budget: int | None) -> Chunks:
    """Chunks for units between `bounds` (0 first, N last) with elements of so many bytes.

    It depends on nothing else, so that two evaluations of the same rows, with or without gradients, multiply matrices
    of the same shapes: libraries round differently for different shapes.

    Raises ValueError where the budget holds less than one row of logits and one of their gradient.
    """
    budget = MEMORY_BUDGET if budget is None else budget
    row_elements = -(-V // ALIGNMENT) * ALIGNMENT
    logits_row, dlogits_row = row_elements * logits_bytes, row_elements * dlogits_bytes
    if budget < logits_row + dlogits_row:
        raise ValueError(
            f"memory_budget of {budget} bytes is less than one row of logits and its gradient take at a vocabulary of "
            f"{V}: {logits_row + dlogits_row} bytes"
        )
    N = bounds[-1]
    longest = max(end - begin for begin, end in pairwise(bounds))
    # A quarter of the budget for logits, or what is left when the gradients of all rows fit, or the longest unit; but
    # never so much that a piece's gradients no longer fit beside it.
    wanted = max(budget // (4 * logits_row), (budget - N * dlogits_row) // logits_row, longest)
    logits_rows = min(wanted, budget // (logits_row + dlogits_row), N)
    dlogits_rows = min((budget - logits_rows * logits_row) // dlogits_row, N)
    return Chunks(logits_rows, dlogits_rows, row_elements, list(chunks_of(bounds, logits_rows)))


def chunks_of(bounds: list[int], rows: int):
    begin = bounds[0]
    for before, end in pairwise(bounds):
        if end - begin > rows and before > begin:
            yield [slice(begin, before)]
            begin = before
        if end - begin > rows:
            yield pieces(begin, end, rows)
            begin = end
    if begin < bounds[-1]:
        yield [slice(begin, bounds[-1])]


def pieces(begin: int, end: int, rows: int) -> list[slice]:
    """At most `rows` each, the last one full."""
    starts = range(end - rows, begin - rows, -rows)
    return [slice(max(start, begin), start + rows) for start in reversed(starts)]
