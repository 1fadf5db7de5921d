"""The ways that are timed against each other compute the same."""

import pytest
import torch

from benchmarks import inputs as inputs_module
from benchmarks import objectives, peers
from benchmarks.host_work import Operations
from benchmarks.objectives import LIGER, OBJECTIVES, TRL, WAYS
from benchmarks.shapes import HeadSizes
from fastp3o_kernels import linear_logprobs

HEAD = HeadSizes(32, 203)
WITHOUT_REFERENCE = ("DPO", "KTO")


def problem():
    inputs = inputs_module.random_inputs(HEAD, 2048)
    inputs.hidden.requires_grad_()
    inputs.weight.requires_grad_()
    return objectives.make_problem(inputs)


def assert_same(found, expected, leaves):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for gradient, target in zip(*(torch.autograd.grad(loss, leaves) for loss in (found, expected)), strict=True):
        assert (gradient - target).norm() < 1e-3 * target.norm()
        assert target.any()


@pytest.mark.parametrize("name", OBJECTIVES)
def test_eager_pytorch_computes_what_we_do(name):
    given = problem()
    leaves = given.inputs.hidden, given.inputs.weight
    assert_same(objectives.ours(given, name), WAYS["eager"][name](given, name), leaves)


@pytest.mark.parametrize("name", TRL)
def test_trl_computes_what_we_do(name):
    pytest.importorskip("trl", reason="the extra `peers` is not installed")
    given = problem()
    leaves = given.inputs.hidden, given.inputs.weight
    assert_same(objectives.ours(given, name), TRL[name](given, name), leaves)


@pytest.mark.parametrize("name", LIGER)
def test_liger_computes_what_we_do(name, monkeypatch):
    pytest.importorskip("liger_kernel", reason="the extra `peers` is not installed")
    if name in WITHOUT_REFERENCE:
        for module in (inputs_module, objectives, peers):
            monkeypatch.setattr(module, "RESPONSE_TOKENS", 4)  # without one, long responses have no gradient in fp32
    given = problem()
    if name in WITHOUT_REFERENCE:
        given.response_tensors["ref"] = torch.zeros_like(given.response_tensors["ref"])
    leaves = given.inputs.hidden, given.inputs.weight
    assert_same(objectives.ours(given, name), objectives.liger(given, name, compiled=False), leaves)


def test_every_token_has_a_gradient_but_where_responses_are_left_out():
    given = problem()
    inputs = given.inputs
    own = linear_logprobs(inputs.hidden, inputs.weight, inputs.labels).detach()
    for name, objective in OBJECTIVES.items():
        groups = given.groups(own.clone().requires_grad_())
        (gradient,) = torch.autograd.grad(objective(groups), groups.token_logprobs)
        share = (gradient != 0).float().mean()
        assert share == {"GRPO+": 0.75}.get(name, 1.0) or (name == "SLiC" and 0.5 < share < 1), name


def test_operations_are_counted_in_place_and_into_given_memory_too():
    a, b, c = torch.ones(2, 3), torch.ones(3, 5), torch.ones(2, 5)
    with Operations() as operations:
        a @ b
        torch.mm(a, b, out=c)
        c.addmm_(a, b)
        torch.addmm(c, a, b, out=c)
        torch.ones(7, 2, 3) @ torch.ones(7, 3, 5)
        torch.relu(a)
    assert operations.total == (4 + 7) * 2 * 2 * 3 * 5
