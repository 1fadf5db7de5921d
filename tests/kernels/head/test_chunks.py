from itertools import accumulate
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o_kernels.head.chunks import ROWS_IN_PLACE, TILE, plan_chunks
from fastp3o_kernels.head.head import HeadDtypes

DTYPES = {2: HeadDtypes(*[torch.bfloat16] * 3, torch.float32), 4: HeadDtypes(*[torch.float32] * 4)}


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    V=st.integers(1, 100),
    dlogits_bytes=st.sampled_from([2, 4]),
    rows_held=st.integers(1, 500),
)
def test_chunks_are_whole_groups_within_the_budget(lengths, V, dlogits_bytes, rows_held):
    bounds = [0, *accumulate(lengths)]
    budget = rows_held * (4 + dlogits_bytes) * -(-V // 16) * 16
    plan = plan_chunks(bounds, V, DTYPES[dlogits_bytes], budget, triton=True)
    assert plan.row_elements >= V
    assert plan.row_elements * (4 * plan.logits_rows + dlogits_bytes * plan.dlogits_rows) <= budget
    assert 1 <= plan.logits_rows == max(span.stop - span.start for chunk in plan.chunks for span in chunk.spans)
    assert 1 <= plan.dlogits_rows <= bounds[-1]
    tokens = [token for chunk in plan.chunks for span in chunk.spans for token in range(span.start, span.stop)]
    assert tokens == list(range(bounds[-1]))
    for groups, own, spans in plan.chunks:
        assert spans[0].start == own.start == bounds[groups.start]
        assert spans[-1].stop == own.stop == bounds[groups.stop]
        if len(spans) > 1:
            assert groups.stop - groups.start == 1
            assert all(span.stop - span.start == plan.logits_rows for span in spans[1:])


def plan_of(N, group, rows_held=100, V=16):
    """The plan for N tokens in groups of one length, with room for so many bf16 rows of each kind."""
    return plan_chunks(list(range(0, N + 1, group)), V, DTYPES[2], rows_held * 6 * V, triton=True)


def test_a_longer_group_gets_a_longer_buffer_while_the_budget_allows():
    assert [plan_of(9990, group).logits_rows for group in (10, 30, 90, 111, 333)] == [50, 30, 90, 100, 100]
    whole = plan_of(30, 10, 10**6)
    assert whole.chunks == [(slice(0, 3), slice(0, 30), [slice(0, 30)])]
    assert (whole.logits_rows, whole.dlogits_rows) == (30, 30)


@pytest.mark.parametrize(
    ("N", "logits_rows", "dlogits_rows"),
    [
        (2048, 768, 2048),  # all gradients at once: no sum
        (2816, 256, 2816),
        (4096, 768, 2048),
        (8192, 768, 2048),
        (32768, 768, 2206),
    ],
)
def test_the_budget_is_divided_for_the_least_traffic_of_the_weight(N, logits_rows, dlogits_rows):
    """For each element of a weight in half precision a chunk reads 2 bytes, and a filling of several moves 10."""
    plan = plan_chunks(list(range(0, N + 1, 256)), 128_256, DTYPES[2], None, triton=True)
    assert (plan.logits_rows, plan.dlogits_rows) == (logits_rows, dlogits_rows)


@given(N=st.integers(1, 3000).map(lambda groups: 10 * groups), rows_held=st.integers(10, 2000))
def test_fillings_are_even_and_their_rows_whole_tiles_where_there_are_many(N, rows_held):
    plan = plan_of(N, 10, rows_held)
    fillings = ceil(N / plan.dlogits_rows)
    assert plan.dlogits_rows == N or N - (fillings - 1) * plan.dlogits_rows > plan.dlogits_rows - fillings * TILE
    most = (rows_held * 6 - plan.logits_rows * 4) // 2
    assert plan.dlogits_rows in (N, most) or plan.dlogits_rows % TILE == 0


@given(st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_chunks_in_place_are_whole_groups_and_no_more_than_even_ones(lengths):
    plan = plan_chunks([0, *accumulate(lengths)], 64, DTYPES[4], None, triton=False)
    assert sum(bool(chunk.spans) for chunk in plan.chunks) <= max(round(sum(lengths) / ROWS_IN_PLACE), 1)
    assert all(len(chunk.spans) <= 1 for chunk in plan.chunks)
