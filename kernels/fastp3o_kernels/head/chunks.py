"""A memory budget -> the tokens whose hidden states go through the head together.

N tokens, V vocabulary. A group is what must stay whole for a coefficient to be known: the responses to a prompt. A span
is a slice of tokens whose logits are computed in one matrix product.
"""

from collections.abc import Iterator
from itertools import pairwise
from math import ceil
from typing import NamedTuple

from fastp3o_kernels.head.head import HeadDtypes

# Bytes of scratch for logits and their gradient. Every chunk reads the weight, every full gradient buffer reads it once
# more and reads and writes the fp32 sum of its gradient: the larger the buffers, the fewer of both.
# benchmarks/NOTES.md has the traffic by budget.
MEMORY_BUDGET = 960_000_000

# Share of the budget for gradients of logits where they do not fit all at once. For each element of a weight in half
# precision a chunk's logits cost 2 bytes of traffic, and a filling of the buffer for gradients 10. A row of logits has
# 4 bytes for each, and one of gradients 2: the traffic is least with 0.61 for gradients, and with 0.63 in fp32.
GRADIENTS_SHARE = 5 / 8
# The least share for logits where all gradients fit: below it more chunks cost what fewer fillings save.
LEAST_LOGITS_SHARE = 1 / 8

# Products take rows in tiles of so many.
TILE = 128

# Tokens, about, that go through the head together where their gradients take the place of the logits: more gain nothing
# in the products, and no longer are in a processor's caches for the softmax.
ROWS_IN_PLACE = 512

# Rows of both buffers begin at a multiple of this many elements, whatever the vocabulary: matrix products and kernels
# then read them in their widest loads.
ALIGNMENT = 16


class Chunk(NamedTuple):
    """Whole groups, in one span unless a group is larger than the buffer for logits.

    The last of several spans fills the buffer, where its logits stay for the backward products; those of the others are
    computed twice.
    """

    groups: slice
    tokens: slice
    spans: list[slice]  # none if its groups are empty


class HeadPlan(NamedTuple):
    """Dtypes, buffers [rows, row_elements] and chunks in which tokens go through the head."""

    dtypes: HeadDtypes
    V: int
    row_elements: int  # V, aligned
    logits_rows: int  # of the buffer for logits
    dlogits_rows: int  # of the buffer for gradients of logits that wait for their products; in place: that would fit
    chunks: list[Chunk]
    in_place: bool  # gradients take the logits' place, and have no buffer


def plan_chunks(
    bounds: list[int],
    V: int,
    dtypes: HeadDtypes,
    memory_budget: int | None,
    teacher: HeadDtypes | None = None,
    *,
    triton: bool,
) -> HeadPlan:
    """Chunks for groups between `bounds` (0 first, N last), within this many bytes (None: MEMORY_BUDGET).

    It depends on nothing else, so that two evaluations of the same tokens, with or without gradients, multiply matrices
    of the same shapes: libraries round differently for different shapes.
    teacher: of a teacher, whose logits have a buffer as long as that for the head's own. triton: whether kernels write
    the gradients; PyTorch writes those of the logits' dtype in their place.

    Raises ValueError where the budget holds less than one row of logits and one of their gradient.
    """
    budget = MEMORY_BUDGET if memory_budget is None else memory_budget
    row_elements = -(-V // ALIGNMENT) * ALIGNMENT
    logits_bytes = row_elements * (dtypes.logits.itemsize + (teacher.logits.itemsize if teacher else 0))
    in_place = not triton and dtypes.multiplied == dtypes.logits
    dlogits_bytes = 0 if in_place else row_elements * dtypes.dlogits.itemsize
    if budget < logits_bytes + dlogits_bytes:
        raise ValueError(
            f"memory_budget of {budget} bytes is less than one row of logits and its gradient take at a vocabulary of "
            f"{V}: {logits_bytes + dlogits_bytes} bytes"
        )
    N = bounds[-1]
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    if in_place:
        fitting = min(budget // logits_bytes, N)
        # Even chunks: each reads the weight, and its gradient again, however few its tokens are.
        even = ceil(N / max(round(N / ROWS_IN_PLACE), 1)) + longest - 1
        chunks = list(divide(bounds, min(even, fitting)))
        logits_rows = longest_span(chunks)
        return HeadPlan(dtypes, V, row_elements, logits_rows, fitting, chunks, in_place)
    logits_rows = (budget - N * dlogits_bytes) // logits_bytes
    if logits_rows < max(LEAST_LOGITS_SHARE * budget // logits_bytes, longest):
        fillings = ceil(N * dlogits_bytes / (GRADIENTS_SHARE * budget))
        logits_rows = (budget - ceil(N / fillings) * dlogits_bytes) // logits_bytes
    # Groups stay whole where a row of gradients is left for each of logits.
    logits_rows = min(max(logits_rows, longest), budget // (logits_bytes + dlogits_bytes), N)
    chunks = list(divide(bounds, logits_rows))
    logits_rows = longest_span(chunks)
    most = (budget - logits_rows * logits_bytes) // dlogits_bytes
    # Even fillings: a last one of a few rows would cost the weight's traffic of a full one.
    tiles = ceil(N / max(ceil(N / most), 1) / TILE)
    return HeadPlan(dtypes, V, row_elements, logits_rows, min(most, tiles * TILE, N), chunks, in_place)


def longest_span(chunks: list[Chunk]) -> int:
    return max((span.stop - span.start for chunk in chunks for span in chunk.spans), default=0)


def divide(bounds: list[int], most: int) -> Iterator[Chunk]:
    """Each chunk has as many whole groups as fit `most` tokens; a larger group is a chunk of several spans."""
    first = 0
    for last in range(1, len(bounds)):
        if last == len(bounds) - 1 or bounds[last + 1] - bounds[first] > most:
            begin, end = bounds[first], bounds[last]
            # All spans but the first are full.
            starts = reversed(range(end - most, begin - most, -most)) if begin < end else ()
            spans = [slice(max(start, begin), start + most) for start in starts]
            yield Chunk(slice(first, last), slice(begin, end), spans)
            first = last
