from types import SimpleNamespace

from benchmarks.conftest import order
from benchmarks.shapes import TOKENS


def item(name, **params):
    return SimpleNamespace(name=name, callspec=SimpleNamespace(params=params))


def test_a_run_that_ends_early_has_measured_the_most_telling():
    first, second = TOKENS[:2]
    wanted = [
        item("test_forward_and_backward", tokens=first),
        item("test_fastp3o_with_a_frozen_head", tokens=first),
        SimpleNamespace(name="test_log_ratio_of_fastp3o"),
        item("test_forward_and_backward_of_peers", tokens=first),
        item("test_frozen_head_of_peers"),
        item("test_rollouts_of_fastp3o"),
        item("test_forward_and_backward", tokens=second),
        item("test_forward_and_backward_of_peers", tokens=second),
        item("test_objective_of_fastp3o"),
        item("test_objective_of_peers"),
        item("test_forward_without_gradients", tokens=first),
        item("test_passes_apart"),
    ]
    assert sorted(wanted, key=order) == wanted
