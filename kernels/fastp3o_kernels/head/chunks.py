"""A memory budget -> the tokens whose hidden states go through the head together.

N tokens, V vocabulary. A unit is what must not be divided for a coefficient to be known: the responses to a prompt. A
span is a slice of tokens whose logits are computed in one matrix product.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from fastp3o_kernels.head.dtypes import HeadDtypes

# Bytes of scratch for logits and their gradient. The larger, the fewer times the weight's gradient is read and written:
# once per full gradient buffer, so budget / V matters. benchmarks/NOTES.md says what is known of the choice.
MEMORY_BUDGET = 960_000_000

# Rows of both buffers begin at a multiple of this many elements, whatever the vocabulary: matrix products and kernels
# then read them in their widest loads.
ALIGNMENT = 16


class Chunk(NamedTuple):
    """Whole units, in one span unless a unit is larger than the buffer for logits.

    The last of several spans fills the buffer, where its logits stay for the backward products; those of the others are
    computed twice.
    """

    units: slice  # numbers of its units
    spans: list[slice]  # none where its units are empty


class HeadPlan(NamedTuple):
    """How tokens go through the head: in which dtypes, by what buffers [rows, row_elements], in which chunks."""

    dtypes: HeadDtypes
    V: int
    row_elements: int  # V, aligned
    logits_rows: int  # of the buffer for logits
    dlogits_rows: int  # of the buffer for gradients of logits that wait for their products
    chunks: list[Chunk]


def plan_chunks(bounds: list[int], V: int, dtypes: HeadDtypes, memory_budget: int | None) -> HeadPlan:
    """Chunks for units between `bounds` (0 first, N last), within so many bytes (None: MEMORY_BUDGET).

    It depends on nothing else, so that two evaluations of the same tokens, with or without gradients, multiply matrices
    of the same shapes: libraries round differently for different shapes.

    Raises ValueError where the budget holds less than one row of logits and one of their gradient.
    """
    budget = MEMORY_BUDGET if memory_budget is None else memory_budget
    row_elements = -(-V // ALIGNMENT) * ALIGNMENT
    logits_bytes, dlogits_bytes = row_elements * dtypes.logits.itemsize, row_elements * dtypes.multiplied.itemsize
    if budget < logits_bytes + dlogits_bytes:
        raise ValueError(
            f"memory_budget of {budget} bytes is less than one row of logits and its gradient take at a vocabulary of "
            f"{V}: {logits_bytes + dlogits_bytes} bytes"
        )
    N = bounds[-1]
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    # A quarter of the budget for logits, or what is left when the gradients of all tokens fit, or the longest unit; but
    # never so much that a span's gradients no longer fit beside it.
    wanted = max(budget // (4 * logits_bytes), (budget - N * dlogits_bytes) // logits_bytes, longest)
    logits_rows = min(wanted, budget // (logits_bytes + dlogits_bytes), N)
    dlogits_rows = min((budget - logits_rows * logits_bytes) // dlogits_bytes, N)
    return HeadPlan(dtypes, V, row_elements, logits_rows, dlogits_rows, list(divide(bounds, logits_rows)))


def divide(bounds: list[int], most: int) -> Iterator[Chunk]:
    """As many whole units as `most` tokens hold to a chunk; a larger unit is a chunk of several spans."""
    first = 0
    for unit, (begin, end) in enumerate(pairwise(bounds)):
        if end - bounds[first] > most and unit > first:
            yield Chunk(slice(first, unit), one_span(bounds[first], begin))
            first = unit
        if end - begin > most:
            yield Chunk(slice(unit, unit + 1), divide_unit(begin, end, most))
            first = unit + 1
    if first < len(bounds) - 1:
        yield Chunk(slice(first, len(bounds) - 1), one_span(bounds[first], bounds[-1]))


def one_span(begin: int, end: int) -> list[slice]:
    """None where there is no token."""
    return [slice(begin, end)] if begin < end else []


def divide_unit(begin: int, end: int, most: int) -> list[slice]:
    """Spans of at most so many tokens, all but the first full."""
    starts = range(end - most, begin - most, -most)
    return [slice(max(start, begin), start + most) for start in reversed(starts)]
