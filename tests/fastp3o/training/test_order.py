from hypothesis import given
from hypothesis import strategies as st

from fastp3o.training.order import examples_of_step, seed_of


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_every_pass_takes_every_example_once(batch_size, total, seed):
    steps = -(-2 * total // batch_size)
    order = {"batch_size": batch_size, "total": total, "seed": seed}
    examples = [example for step in range(steps) for example in examples_of_step(step, **order)]
    assert len(examples) == steps * batch_size
    assert sorted(examples[:total]) == sorted(examples[total : 2 * total]) == list(range(total))


def test_seeds_differ_by_every_part():
    assert len({seed_of(a, b) for a in range(20) for b in range(20)}) == 400
