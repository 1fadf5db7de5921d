from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o.packing.bins import balanced, deal, first_fit_decreasing

sizes = st.lists(st.integers(1, 40), max_size=30)
few = settings(max_examples=60, deadline=None)


@few
@given(sizes, st.integers(1, 40))
def test_bins_hold_every_index_once_and_no_more_than_fits(sizes, capacity):
    bins = first_fit_decreasing(sizes, capacity)
    assert sorted(index for indices in bins for index in indices) == list(range(len(sizes)))
    for indices in bins:
        assert indices
        assert len(indices) == 1 or sum(sizes[i] for i in indices) <= capacity
    # No two bins fit into one.
    totals = sorted(sum(sizes[i] for i in indices) for indices in bins)
    assert len(totals) < 2 or totals[0] + totals[1] > capacity
    # The largest go first, into the first bin with room.
    assert first_fit_decreasing([3, 9, 4, 4, 12, 1], 10) == [[4], [1, 5], [2, 3], [0]]


@few
@given(st.integers(1, 5), st.integers(0, 6), st.data())
def test_balanced_parts_are_of_equal_counts_and_near_sums(parts, each, data):
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=parts * each, max_size=parts * each))
    members = balanced(sizes, parts)
    assert [len(part) for part in members] == [each] * parts
    assert sorted(index for part in members for index in part) == list(range(len(sizes)))
    sums = [sum(sizes[i] for i in part) for part in members]
    assert max(sums) - min(sums) <= max(sizes, default=0) - min(sizes, default=0)
    assert balanced([8, 1, 7, 2, 6, 3], 3) == [[0, 1], [2, 3], [4, 5]]


@given(
    st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=12), min_size=1, max_size=6),
    st.integers(1, 6),
)
def test_every_group_is_dealt_once_and_evenly(steps, processes):
    before = [0] * processes
    for sizes, parts in zip(steps, deal(steps, processes), strict=True):
        assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
        assert processes > 1 or parts == [list(range(len(sizes)))]
        tokens = [sum(sizes[index] for index in part) for part in parts]
        # No process has more than another by more than one group.
        assert max(tokens) - min(tokens) <= max(sizes)
        assert all(parts) or len(sizes) < processes
        if len(sizes) < processes:
            pairs = list(zip(before, parts, strict=True))
            assert max(b for b, part in pairs if part) <= min(b for b, part in pairs if not part)
        before = [b + t for b, t in zip(before, tokens, strict=True)]
