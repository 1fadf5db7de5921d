"""Hidden states -> P3O's loss -> gradients, next to the bare matrix products of the head.

    python -m pytest benchmarks/test_hidden_level.py

F = N V D multiply-adds, 2 F operations. fastp3o computes gradients in the forward pass, so its
"forward" is nearly all of "forward and backward", the only one to compare.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from benchmarks import bare_operations, implementations, peers
from benchmarks.goals import BY_TORCH
from benchmarks.inputs import Inputs, random_inputs
from benchmarks.measure import Case, measure, one_at_a_time
from benchmarks.shapes import CUDA, DTYPE, DTYPES, HEADS, TOKENS, HeadSizes, dtype_name, typed
from fastp3o_kernels import onednn

BOTH = "forward and backward"
OURS = {
    "fastp3o": implementations.hidden_fastp3o,
    "fastp3o linear_logprobs": implementations.hidden_fastp3o_logprobs,
}
# Heads and tokens at which a choice of products is judged, on any CPU.
CHOSEN_AT = [
    (HeadSizes(256, 8192), 512),
    (HeadSizes(1024, 4096), 512),
    (HeadSizes(256, 8192), 2048),
]
CHOSEN_AT += [(HeadSizes(256, 50304), 512), (HeadSizes(512, 32000), 1024)]
PRODUCTS = "three products"
OF_CHOICE = {
    "fastp3o": implementations.hidden_fastp3o,
    BY_TORCH: implementations.hidden_fastp3o_by_torch,
    "eager": implementations.hidden_eager,
}


# Bytes for logits and their gradients in place of the default, at the largest vocabularies, where
# they decide how often the weight's gradient is summed.
BUDGETS = [1_000_000_000, 2_000_000_000, 4_500_000_000, 5_000_000_000]


def named(implementations: dict[str, Callable]) -> list:
    return [
        pytest.param(name, function, id=typed(name)) for name, function in implementations.items()
    ]


@one_at_a_time
def latest_inputs(head: HeadSizes, tokens: int, dtype: torch.dtype) -> Inputs:
    return random_inputs(head, tokens, dtype)


def fresh_inputs(head: HeadSizes, tokens: int, dtype: torch.dtype = DTYPE) -> Inputs:
    """One set of inputs at a time in memory, with fresh leaves."""
    return latest_inputs(head, tokens, dtype).trained()


def make_case(
    name: str, passes: str, inputs: Inputs, products: int, gradients: tuple[Tensor, ...]
) -> Case:
    (N, D), V = inputs.hidden.shape, len(inputs.weight)
    gradient_bytes = sum(tensor.numel() * tensor.element_size() for tensor in gradients)
    dtype = dtype_name(inputs.hidden.dtype)
    return Case(
        "hidden", name, passes, N, D, V, dtype, 0, 2.0 * products * N * V * D, gradient_bytes
    )


def errors(compute_loss: Callable[[Inputs], Tensor], inputs: Inputs) -> dict[str, float]:
    """Errors of the loss, and relative ones of its gradients, against fp64 on the same inputs."""
    exact = inputs.in_fp64()
    leaves = exact.hidden, exact.weight = (
        exact.hidden.detach().requires_grad_(),
        exact.weight.detach().requires_grad_(),
    )
    expected = implementations.hidden_eager(exact)
    targets = torch.autograd.grad(expected, leaves)
    loss = compute_loss(inputs)
    gradients = torch.autograd.grad(loss, (inputs.hidden, inputs.weight))
    named = zip(("dhidden_error", "dweight_error"), gradients, targets, strict=True)
    relative = {
        name: ((got.double() - target).norm() / target.norm()).item() for name, got, target in named
    }
    return {"loss_error": abs(loss - expected).item()} | relative


def is_of_p3o(name: str) -> bool:
    """Whether a row's loss is P3O's; else a peer's own, of which only time and memory compare."""
    return "GRPO" not in name and "cross-entropy" not in name


def run_both(benchmark, name, compute_loss, inputs, passes=BOTH) -> None:
    leaves = inputs.hidden, inputs.weight
    measure(
        benchmark,
        make_case(name, passes, inputs, 3, leaves),
        prepare=lambda: None,
        run=lambda _: torch.autograd.grad(compute_loss(inputs), leaves),
        bare=bare_operations.products(inputs, logits=1, dhidden=1, dweight=1),
    )


def id_of(value: str | torch.dtype) -> str:
    return typed(value) if isinstance(value, str) else dtype_name(value)


def names_and_dtypes() -> list[tuple[str, torch.dtype]]:
    first = [(name, DTYPE) for name in OURS | peers.HIDDEN]
    return first + [(name, dtype) for dtype in DTYPES[1:] for name in ("fastp3o", "eager")]


@pytest.mark.parametrize(("name", "dtype"), names_and_dtypes(), ids=id_of)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_and_backward(benchmark, name, dtype, head, tokens):
    inputs, compute_loss = fresh_inputs(head, tokens, dtype), (OURS | peers.HIDDEN)[name]
    run_both(benchmark, name, compute_loss, inputs)
    if tokens == min(TOKENS) and dtype == DTYPE and is_of_p3o(name):
        benchmark.extra_info |= errors(compute_loss, inputs)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("name", OURS)
def test_ragged_pairs(benchmark, name, head, tokens):
    run_both(
        benchmark,
        name,
        OURS[name],
        random_inputs(head, tokens, ragged=True).trained(),
        f"{BOTH}, ragged",
    )


@pytest.mark.skipif(CUDA, reason="a GPU has no choice of products")
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("shape", CHOSEN_AT)
@pytest.mark.parametrize(
    ("name", "over"), [*((name, PRODUCTS) for name in OF_CHOICE), ("fastp3o", BY_TORCH)]
)
def test_fastp3o_with_the_products_that_it_chose(benchmark, shape, ragged, name, over):
    """Over three products, as PyTorch and fastp3o with torch's products; and over the latter's
    time, which a wrong choice exceeds.
    """
    head, tokens = shape
    inputs = random_inputs(head, tokens, torch.float32, ragged=ragged).trained()
    leaves = inputs.hidden, inputs.weight
    bare = bare_operations.products(inputs, logits=1, dhidden=1, dweight=1)
    if over == BY_TORCH:
        bare = lambda: torch.autograd.grad(OF_CHOICE[BY_TORCH](inputs), leaves)  # noqa: E731
    case = make_case(
        name, f"{BOTH}, {'ragged' if ragged else 'even'}, over {over}", inputs, 3, leaves
    )
    case = replace(case, level="chosen products")
    measure(
        benchmark,
        case,
        lambda: None,
        lambda _: torch.autograd.grad(OF_CHOICE[name](inputs), leaves),
        bare,
    )
    benchmark.extra_info["choice"] = onednn.choice()._asdict()


@pytest.mark.parametrize(("name", "compute_loss"), named(peers.HIDDEN_FIRST_HEAD))
@pytest.mark.parametrize("head", HEADS[:1])
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_and_backward_of_peers(benchmark, name, compute_loss, head, tokens):
    inputs = fresh_inputs(head, tokens)
    run_both(benchmark, name, compute_loss, inputs)
    if tokens == min(TOKENS) and is_of_p3o(name):
        benchmark.extra_info |= errors(compute_loss, inputs)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fastp3o_with_a_third_of_the_pairs_clipped(benchmark, head, tokens):
    inputs = fresh_inputs(head, tokens).a_third_clipped()
    run_both(
        benchmark,
        "fastp3o",
        implementations.hidden_fastp3o,
        inputs,
        "forward and backward, a third clipped",
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fastp3o_with_a_frozen_head(benchmark, head, tokens, dtype):
    inputs = fresh_inputs(head, tokens, dtype)
    inputs.weight = inputs.weight.detach()
    measure(
        benchmark,
        make_case("fastp3o", "frozen head, forward and backward", inputs, 2, (inputs.hidden,)),
        prepare=lambda: None,
        run=lambda _: torch.autograd.grad(OURS["fastp3o"](inputs), (inputs.hidden,)),
        bare=bare_operations.products(inputs, logits=1, dhidden=1, dweight=0),
    )


@pytest.mark.parametrize("budget", BUDGETS[::-1])
@pytest.mark.parametrize("head", HEADS[-2:])
def test_fastp3o_within_a_budget(benchmark, head, budget):
    inputs = fresh_inputs(head, TOKENS[0])
    within = partial(implementations.hidden_fastp3o, memory_budget=budget)
    run_both(benchmark, "fastp3o", within, inputs, f"{BOTH}, budget of {budget / 1e9:.1f} GB")


@pytest.mark.parametrize("tokens", TOKENS)
def test_fastp3o_without_gradients(benchmark, tokens):
    """Reference and old log-probs."""
    inputs = fresh_inputs(HEADS[0], tokens)
    case = make_case("fastp3o", "forward without gradients", inputs, 1, ())
    bare = bare_operations.products(inputs, logits=1, dhidden=0, dweight=0)
    measure(benchmark, case, lambda: None, torch.no_grad()(lambda _: OURS["fastp3o"](inputs)), bare)
