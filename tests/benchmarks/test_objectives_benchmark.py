"""The ways that are timed against each other compute the same."""

import pytest
import torch

from benchmarks import inputs as inputs_module
from benchmarks import objectives, peers
from benchmarks.objectives import LIGER, OBJECTIVES, TRL, WAYS
from benchmarks.shapes import HeadSizes

HEAD = HeadSizes(32, 203)


EACH = [(way, name) for way, names in {"eager": OBJECTIVES, "TRL": TRL, "Liger": LIGER}.items() for name in names]


@pytest.mark.parametrize(("way", "name"), EACH)
def test_every_way_computes_what_we_do(way, name, monkeypatch):
    if way != "eager":
        pytest.importorskip({"TRL": "trl", "Liger": "liger_kernel"}[way], reason="the extra `peers` is not installed")
    without_reference = way == "Liger" and name in ("DPO", "KTO")
    if without_reference:
        for module in (inputs_module, objectives, peers):
            monkeypatch.setattr(module, "RESPONSE_TOKENS", 4)  # without one, long responses have no gradient in fp32
    inputs = inputs_module.random_inputs(HEAD, 2048)
    leaves = [inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()]
    given = objectives.make_problem(inputs)
    if without_reference:
        given.response_tensors["ref"] = torch.zeros_like(given.response_tensors["ref"])
    if way == "Liger":
        theirs = objectives.liger(given, name, compiled=False)
    else:
        theirs = (TRL if way == "TRL" else WAYS[way])[name](given, name)
    ours = objectives.ours(given, name)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for gradient, target in zip(*(torch.autograd.grad(loss, leaves) for loss in (ours, theirs)), strict=True):
        assert (gradient - target).norm() < 1e-3 * target.norm()
        assert target.any()
