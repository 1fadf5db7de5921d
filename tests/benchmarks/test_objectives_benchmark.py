"""The ways that are timed against each other compute the same."""

import pytest
import torch

from benchmarks import inputs as inputs_module
from benchmarks import objectives
from benchmarks.objectives import LIGER, OBJECTIVES, TRL, WAYS
from benchmarks.shapes import HeadSizes

HEAD = HeadSizes(32, 203)
# which have no reference there
NAMES = {
    "eager": OBJECTIVES,
    "TRL": TRL,
    "Liger": set(LIGER) - {"DPO", "KTO"},
}
EACH = [(way, name) for way, names in NAMES.items() for name in sorted(names)]


@pytest.mark.parametrize(("way", "name"), EACH)
def test_every_way_computes_what_we_do(way, name):
    if way != "eager":
        pytest.importorskip(
            {"TRL": "trl", "Liger": "liger_kernel"}[way],
            reason="the extra `peers` is not installed",
        )
    inputs = inputs_module.random_inputs(HEAD, 2048)
    leaves = [inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()]
    given = objectives.make_problem(inputs)
    by_name = TRL if way == "TRL" else WAYS.get(way, {})
    theirs = (
        objectives.liger(given, name, compiled=False)
        if way == "Liger"
        else by_name[name](given, name)
    )
    ours = objectives.ours(given, name)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for gradient, target in zip(
        *(torch.autograd.grad(loss, leaves) for loss in (ours, theirs)), strict=True
    ):
        assert (gradient - target).norm() < 1e-3 * target.norm()
        assert target.any()
