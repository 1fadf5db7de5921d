"""A memory budget -> the tokens whose hidden states go through the head together.

N tokens, V vocabulary. A group is what must stay whole for a coefficient to be known: the responses
to a prompt. A span is a slice of tokens whose logits are computed in one matrix product.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from math import ceil
from typing import NamedTuple

import torch

from fastp3o_kernels.head.head import HeadDtypes
from fastp3o_kernels.rows.rows import padded

# Bytes of scratch for logits and their gradient, least and most. benchmarks/NOTES.md has the
# modeled time by budget.
MEMORY_BUDGET, MOST_BUDGET = 960_000_000, 4_000_000_000

# Products take rows in tiles of so many.
TILE = 128
# A product of fewer rows takes as long as one of so many: it reads the weight. 765 TFLOP/s, a bare
# product's on an H100 (benchmarks/results/kernels.gpu.json), over 3.0 TB/s.
WEIGHT_ROWS = 255
# Elements of the buffer for gradients: places in it are numbers of 32 bits for whoever multiplies
# it.
MOST_ELEMENTS = 2**31
SHARES = 16  # of the budget, of which logits get some and their gradients the others
LEAST_SHARE = 2  # of logits

# Tokens of which a kernel reads the logits once, at most: more gain little in the product.
ROWS_IN_PIECES = 512

# Tokens, about, that go through the head together where their gradients take the place of the
# logits: more gain nothing in the products, and no longer are in a processor's caches for the
# softmax.
ROWS_IN_PLACE = 512


# --- a plan ---------------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """Whole groups, in one span unless a group is larger than the buffer for logits. The last of
    several spans fills the buffer, where its logits stay for the backward products; those of the
    others are computed twice.
    """

    groups: slice
    tokens: slice
    spans: list[slice]  # none if its groups are empty


class HeadPlan(NamedTuple):
    """Dtypes, buffers [rows, row_elements] and chunks in which tokens go through the head."""

    dtypes: HeadDtypes
    row_elements: int  # V, aligned
    logits_rows: int  # of the buffer for logits
    dlogits_rows: int  # of the buffer for gradients of logits that wait for their products; in place: that would fit
    chunks: list[Chunk]
    in_place: bool = False  # gradients take the logits' place, and have no buffer
    one_pass: bool = False  # gradients are written as logits are read: a span fills their buffer, in pieces of logits

    def pieces(self, span: slice) -> list[slice]:
        """Tokens whose logits come in one product."""
        if not self.one_pass:
            return [span]
        starts = range(span.start, span.stop, self.logits_rows)
        return [slice(start, min(start + self.logits_rows, span.stop)) for start in starts]

    @property
    def fillings(self) -> list[int]:
        """Rows of each filling of the buffer for gradients."""
        if self.one_pass:
            return [span.stop - span.start for chunk in self.chunks for span in chunk.spans]
        N = self.chunks[-1].tokens.stop if self.chunks else 0
        return [
            min(self.dlogits_rows, N - first) for first in range(0, N, max(self.dlogits_rows, 1))
        ]


def modeled_time(plan: HeadPlan) -> float:
    """Time of a plan's products in bf16, forward and backward, in that of a row of one: 2 V D
    operations. Products hide that they read the weight; sums of its gradient hide behind nothing
    (benchmarks/NOTES.md).
    """
    spans = [
        piece
        for chunk in plan.chunks
        for span in (*chunk.spans, *chunk.spans[:-1])
        for piece in plan.pieces(span)
    ]
    fillings = plan.fillings
    products = sum(
        max(ceil(n / TILE) * TILE, WEIGHT_ROWS)
        for n in (*(span.stop - span.start for span in spans), *fillings)
    )
    # One filling's gradient is written in bf16, by a product that hides it. Of several, fp32 is
    # written once, read and written by each of the others, and cast at the end: 4, 8 and 6 bytes
    # where the weight has 2.
    summed = 2 + 4 * (len(fillings) - 1) + 3 if len(fillings) > 1 else 0
    return products + sum(max(n, WEIGHT_ROWS) for n in fillings) + WEIGHT_ROWS * summed


# --- the memory budget ----------------------------------------------------------------------------


def budget_on(device: torch.device, given: int | None) -> int:
    """The caller's budget, or that of a GPU's memory."""
    if given is not None or device.type != "cuda":
        return MEMORY_BUDGET if given is None else given
    return budget_of(torch.cuda.get_device_properties(device).total_memory)


def budget_of(total_memory: int) -> int:
    """A twentieth of so many bytes, within MEMORY_BUDGET and MOST_BUDGET."""
    return min(max(total_memory // 20, MEMORY_BUDGET), MOST_BUDGET)


# --- choosing a plan ------------------------------------------------------------------------------


def plan_chunks(
    bounds: Sequence[int],
    V: int,
    dtypes: HeadDtypes,
    memory_budget: int,
    teacher: HeadDtypes | None = None,
    *,
    triton: bool,
    sum_bytes: int = 0,
    one_pass: bool = False,
) -> HeadPlan:
    """Chunks for groups between `bounds` (0 first, N last), within this many bytes, of the least
    modeled time.

    They depend on nothing else, so that two evaluations of the same tokens, with or without
    gradients, multiply matrices of the same shapes: libraries round differently for different
    shapes. teacher: of a teacher, whose logits have a buffer as long as that for the head's own.
    triton: whether kernels write the gradients; PyTorch writes those of the logits' dtype in their
    place. sum_bytes: what a sum of the weight's gradient over several fillings takes beyond the
    budget. One filling may take it instead. one_pass: see `HeadPlan`.

    Raises ValueError where the budget holds less than one row of logits and one of their gradient.
    """
    return cached_plan(
        tuple(bounds), V, dtypes, memory_budget, teacher, triton, sum_bytes, one_pass
    )


# Rows of an update are evaluated several times: for log-probs, and in every epoch. Plans of
# thousands of groups take milliseconds.
@lru_cache(maxsize=256)
def cached_plan(
    bounds: tuple[int, ...],
    V: int,
    dtypes: HeadDtypes,
    memory_budget: int,
    teacher: HeadDtypes | None,
    triton: bool,
    sum_bytes: int,
    one_pass: bool,
) -> HeadPlan:
    plan = least_plan(bounds, V, dtypes, memory_budget, teacher, triton, one_pass)
    if sum_bytes and not plan.in_place and len(plan.fillings) > 1:
        wider = least_plan(bounds, V, dtypes, memory_budget + sum_bytes, teacher, triton, one_pass)
        if len(wider.fillings) == 1:
            return wider
    return plan


def least_plan(
    bounds: tuple[int, ...],
    V: int,
    dtypes: HeadDtypes,
    memory_budget: int,
    teacher: HeadDtypes | None,
    triton: bool,
    one_pass: bool,
) -> HeadPlan:
    """The plan of the least modeled time within a budget."""
    row_elements = padded(V)
    logits_bytes = row_elements * (
        dtypes.logits.itemsize + (teacher.logits.itemsize if teacher else 0)
    )
    in_place = not triton and dtypes.multiplied == dtypes.logits
    dlogits_bytes = 0 if in_place else row_elements * dtypes.dlogits.itemsize
    if memory_budget < logits_bytes + dlogits_bytes:
        raise ValueError(
            f"memory_budget of {memory_budget} bytes is less than one row of logits and its gradient take at a "
            f"vocabulary of {V}: {logits_bytes + dlogits_bytes} bytes"
        )
    N = bounds[-1]
    longest = max((end - begin for begin, end in pairwise(bounds)), default=0)
    if in_place:
        fitting = min(memory_budget // logits_bytes, N)
        # Even chunks: each reads the weight, and its gradient again, however few its tokens are.
        even = ceil(N / max(round(N / ROWS_IN_PLACE), 1)) + longest - 1
        chunks = list(divide(bounds, min(even, fitting)))
        return HeadPlan(dtypes, row_elements, longest_span(chunks), fitting, chunks, in_place)
    if one_pass:
        return min(
            one_pass_plans(bounds, longest, dtypes, row_elements, memory_budget), key=modeled_time
        )
    sizes = [N * logits_bytes]
    if memory_budget < N * (logits_bytes + dlogits_bytes):
        shares = [memory_budget * share // SHARES for share in range(LEAST_SHARE, SHARES)]
        sizes = [memory_budget - N * dlogits_bytes, *shares]
    # Groups stay whole where a row of gradients is left for each of logits.
    least = min(longest, memory_budget // (logits_bytes + dlogits_bytes))
    most = memory_budget - dlogits_bytes
    candidates = {max(min(size, most) // logits_bytes, least) for size in sizes}
    candidates |= {rows // TILE * TILE for rows in candidates if TILE < rows < longest}
    plans = []
    for rows in sorted(candidates, reverse=True):
        chunks = list(divide(bounds, rows))
        logits_rows = longest_span(chunks)
        most = min(
            (memory_budget - logits_rows * logits_bytes) // dlogits_bytes,
            MOST_ELEMENTS // row_elements,
        )
        # Even fillings: a last one of a few rows would cost the weight's traffic of a full one.
        tiles = ceil(N / max(ceil(N / most), 1) / TILE)
        plans.append(
            HeadPlan(
                dtypes, row_elements, logits_rows, min(most, tiles * TILE, N), chunks, in_place
            )
        )
    return min(plans, key=modeled_time)


def one_pass_plans(
    bounds: tuple[int, ...], longest: int, dtypes: HeadDtypes, row_elements: int, memory_budget: int
) -> Iterator[HeadPlan]:
    """Plans by the rows of logits in a piece, the most first. longest: tokens of a group."""
    N = bounds[-1]
    rows = ROWS_IN_PIECES
    while rows:
        left = memory_budget - min(rows, N) * row_elements * dtypes.logits.itemsize
        most = min(
            left // (row_elements * dtypes.dlogits.itemsize), MOST_ELEMENTS // row_elements, N
        )
        if most > 0 or rows == 1:
            even = ceil(N / max(ceil(N / max(most, 1)), 1)) + longest - 1
            chunks = list(divide(bounds, max(min(most, even), 1)))
            yield HeadPlan(
                dtypes, row_elements, min(rows, N), longest_span(chunks), chunks, one_pass=True
            )
        rows //= 2


def longest_span(chunks: list[Chunk]) -> int:
    return max((span.stop - span.start for chunk in chunks for span in chunk.spans), default=0)


def divide(bounds: Sequence[int], most: int) -> Iterator[Chunk]:
    """Each chunk has as many whole groups as fit `most` tokens; a larger group is a chunk of
    several spans.
    """
    first = 0
    for last in range(1, len(bounds)):
        if last == len(bounds) - 1 or bounds[last + 1] - bounds[first] > most:
            begin, end = bounds[first], bounds[last]
            # All spans but the first are full.
            starts = reversed(range(end - most, begin - most, -most)) if begin < end else ()
            spans = [slice(max(start, begin), start + most) for start in starts]
            yield Chunk(slice(first, last), slice(begin, end), spans)
            first = last
