"""Hidden states -> P3O's loss -> gradients, beside the bare matrix products of the head.

    python -m pytest benchmarks/test_hidden_level.py

F = N V D multiply-adds, 2 F operations. fastp3o computes gradients in the forward pass, so its "forward" is nearly all
of "forward and backward", which alone compares.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from benchmarks import bare_operations, implementations, peers
from benchmarks.inputs import Inputs, random_inputs
from benchmarks.measure import Case, measure, release
from benchmarks.shapes import DTYPE, HEADS, TOKENS, HeadSizes

OURS = {"fastp3o": implementations.hidden_fastp3o, "fastp3o linear_logprobs": implementations.hidden_fastp3o_logprobs}
EVERYWHERE = {"eager": implementations.hidden_eager, "TRL": peers.hidden_trl, "CCE": peers.hidden_cce}
# These compile for each head, or take so long that one head must do.
FIRST_HEAD = {
    "torch linear_cross_entropy": peers.hidden_torch,
    "CCE exact": peers.hidden_cce_exact,
    "Liger GRPO": peers.hidden_liger_grpo,
    "torch.compile": implementations.hidden_compiled,
    "CCE torch.compile": peers.hidden_cce_compiled,
}


def named(implementations: dict[str, Callable]) -> list:
    return [pytest.param(name, function, id=name) for name, function in implementations.items()]


@cache
def latest(head: HeadSizes, tokens: int) -> Inputs:
    return random_inputs(head, tokens)


def inputs_of(head: HeadSizes, tokens: int) -> Inputs:
    """One set of inputs at a time in memory, with fresh leaves."""
    if latest.cache_info().currsize and (head, tokens) != inputs_of.of:
        latest.cache_clear()
        release()
    inputs_of.of = head, tokens
    inputs = latest(head, tokens)
    inputs.hidden, inputs.weight = (tensor.detach().requires_grad_() for tensor in (inputs.hidden, inputs.weight))
    return inputs


def case_of(name: str, passes: str, inputs: Inputs, products: int, gradients: tuple[Tensor, ...]) -> Case:
    (N, D), V = inputs.hidden.shape, len(inputs.weight)
    gradient_bytes = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
    dtype = str(DTYPE).removeprefix("torch.")
    return Case("hidden", name, passes, N, D, V, dtype, 0, 2.0 * products * N * V * D, gradient_bytes)


def errors(loss_of: Callable[[Inputs], Tensor], inputs: Inputs) -> dict[str, float]:
    """Of the loss, and relative ones of its gradients, against fp64 on the same inputs."""
    exact = inputs.in_fp64()
    leaves = exact.hidden, exact.weight = exact.hidden.detach().requires_grad_(), exact.weight.detach().requires_grad_()
    expected = implementations.hidden_eager(exact)
    targets = torch.autograd.grad(expected, leaves)
    loss = loss_of(inputs)
    gradients = torch.autograd.grad(loss, (inputs.hidden, inputs.weight))
    relative = [
        ((got.double() - target).norm() / target.norm()).item() for got, target in zip(gradients, targets, strict=True)
    ]
    return dict(
        zip(("loss_error", "dhidden_error", "dweight_error"), [abs(loss - expected).item(), *relative], strict=True)
    )


def run_both(benchmark, name, loss_of, inputs, passes="forward and backward") -> None:
    leaves = inputs.hidden, inputs.weight
    measure(
        benchmark,
        case_of(name, passes, inputs, 3, leaves),
        prepare=lambda: None,
        run=lambda _: torch.autograd.grad(loss_of(inputs), leaves),
        bare=bare_operations.products(inputs, logits=1, dhidden=1, dweight=1),
    )


def run_frozen(benchmark, name, loss_of, inputs) -> None:
    inputs.weight = inputs.weight.detach()
    measure(
        benchmark,
        case_of(name, "frozen head, forward and backward", inputs, 2, (inputs.hidden,)),
        prepare=lambda: None,
        run=lambda _: torch.autograd.grad(loss_of(inputs), (inputs.hidden,)),
        bare=bare_operations.products(inputs, logits=1, dhidden=1, dweight=0),
    )


@pytest.mark.parametrize(("name", "loss_of"), named(OURS | EVERYWHERE))
@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_and_backward(benchmark, name, loss_of, head, tokens):
    inputs = inputs_of(head, tokens)
    run_both(benchmark, name, loss_of, inputs)
    if tokens == min(TOKENS) and "GRPO" not in name:
        benchmark.extra_info |= errors(loss_of, inputs)


@pytest.mark.parametrize(("name", "loss_of"), named(FIRST_HEAD))
@pytest.mark.parametrize("head", HEADS[:1], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_and_backward_of_peers(benchmark, name, loss_of, head, tokens):
    inputs = inputs_of(head, tokens)
    run_both(benchmark, name, loss_of, inputs)
    if tokens == min(TOKENS) and "GRPO" not in name:
        benchmark.extra_info |= errors(loss_of, inputs)


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fastp3o_with_a_third_of_the_pairs_clipped(benchmark, head, tokens):
    inputs = inputs_of(head, tokens).a_third_clipped()
    run_both(benchmark, "fastp3o", implementations.hidden_fastp3o, inputs, "forward and backward, a third clipped")


@pytest.mark.parametrize("head", HEADS, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fastp3o_with_a_frozen_head(benchmark, head, tokens):
    run_frozen(benchmark, "fastp3o", OURS["fastp3o"], inputs_of(head, tokens))


@pytest.mark.parametrize(("name", "loss_of"), named(EVERYWHERE))
def test_frozen_head_of_peers(benchmark, name, loss_of):
    run_frozen(benchmark, name, loss_of, inputs_of(HEADS[0], TOKENS[0]))


@pytest.mark.parametrize(("name", "loss_of"), named(OURS | EVERYWHERE | FIRST_HEAD))
@pytest.mark.parametrize("head", HEADS[:1], ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_without_gradients(benchmark, name, loss_of, head, tokens):
    """Reference and old log-probs."""
    inputs = inputs_of(head, tokens)

    @torch.no_grad()
    def run(_):
        return loss_of(inputs)

    bare = bare_operations.products(inputs, logits=1, dhidden=0, dweight=0)
    measure(benchmark, case_of(name, "forward without gradients", inputs, 1, ()), lambda: None, run, bare)


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize(("name", "loss_of"), named(OURS | EVERYWHERE | FIRST_HEAD))
@pytest.mark.parametrize("head", HEADS[:1], ids=str)
@pytest.mark.parametrize("tokens", TOKENS[:1])
def test_passes_apart(benchmark, passes, name, loss_of, head, tokens):
    inputs = inputs_of(head, tokens)
    leaves = inputs.hidden, inputs.weight
    backward = passes == "backward"
    measure(
        benchmark,
        case_of(name, passes, inputs, 2 if backward else 1, leaves if backward else ()),
        prepare=(lambda: loss_of(inputs)) if backward else lambda: None,
        run=(lambda loss: torch.autograd.grad(loss, leaves)) if backward else lambda _: loss_of(inputs),
        bare=bare_operations.products(inputs, logits=1 - backward, dhidden=int(backward), dweight=int(backward)),
    )
