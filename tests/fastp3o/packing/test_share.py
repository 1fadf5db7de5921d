from hypothesis import given
from hypothesis import strategies as st

from fastp3o.packing.pack import deal, derived_seed, examples_of_step


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_every_pass_takes_every_example_once(batch_size, total, seed):
    steps = -(-2 * total // batch_size)
    order = {"batch_size": batch_size, "total": total, "seed": seed}
    examples = [example for step in range(steps) for example in examples_of_step(step, **order)]
    assert len(examples) == steps * batch_size
    assert sorted(examples[:total]) == sorted(examples[total : 2 * total]) == list(range(total))


def test_another_pass_has_another_order():
    examples = [examples_of_step(step, batch_size=30, total=30, seed=0) for step in range(3)]
    assert examples[0] != examples[1] != examples[2]


def test_seeds_differ_by_every_part():
    assert len({derived_seed(a, b) for a in range(20) for b in range(20)}) == 400


@given(st.lists(st.lists(st.integers(1, 900), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 6))
def test_every_group_is_dealt_once_and_evenly(steps, processes):
    before = [0] * processes
    for sizes, parts in zip(steps, deal(steps, processes), strict=True):
        assert sorted(index for part in parts for index in part) == list(range(len(sizes)))
        tokens = [sum(sizes[index] for index in part) for part in parts]
        # No process has more than another by more than one group.
        assert max(tokens) - min(tokens) <= max(sizes)
        assert all(parts) or len(sizes) < processes
        if len(sizes) < processes:
            assert max(b for b, part in zip(before, parts, strict=True) if part) <= min(
                b for b, part in zip(before, parts, strict=True) if not part
            )
        before = [b + t for b, t in zip(before, tokens, strict=True)]


def test_one_process_is_dealt_everything_in_order():
    assert deal([[3, 9, 1], [2]], 1) == [[[0, 1, 2]], [[0]]]
