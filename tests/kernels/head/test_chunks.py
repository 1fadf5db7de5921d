from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o_kernels.head.chunks import plan_chunks
from fastp3o_kernels.head.dtypes import HeadDtypes

DTYPES = {2: HeadDtypes(torch.bfloat16, torch.bfloat16, torch.float32), 4: HeadDtypes(*[torch.float32] * 3)}


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    V=st.integers(1, 100),
    dlogits_bytes=st.sampled_from([2, 4]),
    rows_held=st.integers(1, 500),
)
def test_chunks_are_whole_groups_within_the_budget(lengths, V, dlogits_bytes, rows_held):
    bounds = [0, *accumulate(lengths)]
    budget = rows_held * (4 + dlogits_bytes) * -(-V // 16) * 16
    plan = plan_chunks(bounds, V, DTYPES[dlogits_bytes], budget)
    assert plan.row_elements >= V
    assert plan.row_elements * (4 * plan.logits_rows + dlogits_bytes * plan.dlogits_rows) <= budget
    assert 1 <= plan.logits_rows <= plan.dlogits_rows
    tokens = [token for chunk in plan.chunks for span in chunk.spans for token in range(span.start, span.stop)]
    assert tokens == list(range(bounds[-1]))
    for groups, own, spans in plan.chunks:
        assert spans[0].start == own.start == bounds[groups.start]
        assert spans[-1].stop == own.stop == bounds[groups.stop]
        assert all(span.stop - span.start <= plan.logits_rows for span in spans)
        if len(spans) > 1:
            assert groups.stop - groups.start == 1
            assert all(span.stop - span.start == plan.logits_rows for span in spans[1:])


def test_a_longer_group_gets_a_longer_buffer_while_the_budget_allows():
    def rows(longest):
        return plan_chunks([0, *range(longest, 10_000)], 16, DTYPES[2], 100 * 6 * 16).logits_rows

    assert rows(10) == 37
    assert rows(60) == 60
    assert rows(5000) == 100


def test_everything_at_once_where_it_fits():
    plan = plan_chunks([0, 10, 20, 30], 16, DTYPES[2], 10**9)
    assert plan.chunks == [(slice(0, 3), slice(0, 30), [slice(0, 30)])]
    assert (plan.logits_rows, plan.dlogits_rows) == (30, 30)


def test_a_budget_of_no_row_is_refused():
    with pytest.raises(ValueError, match=r"memory_budget of 95 bytes is less than .* 96 bytes"):
        plan_chunks([0, 4], 16, DTYPES[2], 95)
