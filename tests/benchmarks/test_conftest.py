from types import SimpleNamespace

from benchmarks.conftest import order
from benchmarks.shapes import ROWS


def item(name, **params):
    return SimpleNamespace(name=name, callspec=SimpleNamespace(params=params))


def test_a_run_that_ends_early_has_measured_the_most_telling():
    first, second = ROWS[:2]
    wanted = [
        item("test_forward_and_backward", rows=first),
        item("test_fastp3o_with_a_frozen_head", rows=first),
        SimpleNamespace(name="test_log_ratio_of_fastp3o"),
        item("test_forward_and_backward_of_peers", rows=first),
        item("test_frozen_head_of_peers"),
        item("test_forward_and_backward", rows=second),
        item("test_forward_and_backward_of_peers", rows=second),
        item("test_forward_without_gradients", rows=first),
        item("test_passes_apart"),
    ]
    assert sorted(wanted, key=order) == wanted
