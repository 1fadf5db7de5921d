import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.packing.seeds import derived_seed, examples_of_step, order_of_pass, shuffled


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 1000))
def test_every_pass_takes_every_example_once_in_another_order(batch_size, total, seed):
    steps = -(-2 * total // batch_size)
    order = {"batch_size": batch_size, "total": total, "seed": seed}
    examples = [example for step in range(steps) for example in examples_of_step(step, **order)]
    assert len(examples) == steps * batch_size
    assert sorted(examples[:total]) == sorted(examples[total : 2 * total]) == list(range(total))
    first, second, third = (
        examples_of_step(step, batch_size=30, total=30, seed=0) for step in range(3)
    )
    assert first != second != third


def test_a_pass_is_shuffled_once_also_where_others_are_looked_at_meanwhile(monkeypatch):
    """Rollouts may be some updates ahead; texts of a pretraining mix have passes of their own; the
    minibatches of each inner epoch are shuffled in between.
    """
    counted, shuffle = [], torch.randperm
    monkeypatch.setattr(
        torch,
        "randperm",
        lambda *args, **options: counted.append(args) or shuffle(*args, **options),
    )
    order_of_pass.cache_clear()
    for step in range(20):
        for ahead in (0, 3):
            examples_of_step(step + ahead, batch_size=3, total=30, seed=1)
            examples_of_step(step + ahead, batch_size=2, total=31, seed=2)
        for epoch in range(8):
            shuffled(4, derived_seed(step, epoch))
    assert [args for args in counted if args != (4,)] == [(30,), (31,), (30,), (31,), (30,)]


def test_seeds_differ_by_every_part():
    assert len({derived_seed(a, b) for a in range(20) for b in range(20)}) == 400
