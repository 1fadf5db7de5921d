"""Logits -> P3O's loss -> gradient of the logits, next to a bare copy of as many bytes.

    python -m pytest benchmarks/test_logits_level.py

The least traffic, for elements of b bytes: forward N V b, backward in place 2 N V b, both 3 N V b.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from benchmarks import bare_operations, implementations, peers
from benchmarks.inputs import Inputs
from benchmarks.measure import Case, measure
from benchmarks.shapes import CUDA, DTYPES, HEADS, TOKENS, dtype_name
from benchmarks.test_hidden_level import fresh_inputs, named
from fastp3o_kernels import sequence_logprobs, token_logprobs

OURS = {"fastp3o": implementations.logits_fastp3o}
OTHERS = {"eager": implementations.logits_eager, "torch.compile": implementations.logits_compiled}
FIRST_HEAD = {"TRL": peers.logits_trl, "Liger GRPO": peers.logits_liger_grpo}
# Losses whose gradient takes the place of the logits; in PyTorch none does.
IN_PLACE = ("fastp3o", "Liger GRPO") if CUDA else ()

LossOf = Callable[[Tensor, Inputs], Tensor]


class Logits:
    """Logits of the inputs, restored before every pass, as a backward pass in place leaves their
    gradient there.

    inputs: of the policy with these very logits. Rounding them to bf16 moves pairs past the clip
    range, and the rows of clipped pairs are not read, so the traffic would be less than it is
    counted.
    """

    def __init__(self, inputs: Inputs):
        with torch.no_grad():
            self.source = inputs.hidden @ inputs.weight.T
            sums = sequence_logprobs(
                token_logprobs(self.source, inputs.labels), inputs.cu_seqlens
            ).view(-1, 2)
        self.inputs = inputs.for_policy(sums)
        self.leaf = torch.empty_like(self.source).requires_grad_()

    def restored(self) -> Tensor:
        with torch.no_grad():
            self.leaf.copy_(self.source)
        # A leaf's values would have to be kept.
        return self.leaf.view_as(self.leaf)

    def copy(self) -> bare_operations.BareOperation:
        return bare_operations.copy(self.source, self.leaf.data)


def make_case(name: str, passes: str, logits: Logits, accesses: int) -> Case:
    """`accesses`: times that each logit is read or written, at the least."""
    (N, D), V = logits.inputs.hidden.shape, len(logits.inputs.weight)
    size = logits.source.numel() * logits.source.element_size()
    gradient_bytes = 0 if passes == "forward" or name in IN_PLACE else size
    dtype = dtype_name(logits.source.dtype)
    return Case("logits", name, passes, N, D, V, dtype, float(accesses * size), 0, gradient_bytes)


def run_both(benchmark, name, compute_loss: LossOf, inputs) -> None:
    logits = Logits(inputs)

    def run(fresh: Tensor):
        return torch.autograd.grad(compute_loss(fresh, logits.inputs), fresh)

    case = make_case(name, "forward and backward", logits, 3)
    measure(benchmark, case, logits.restored, run, logits.copy(), 3 / 2)


def gradient_error(compute_loss: LossOf, inputs: Inputs) -> float:
    logits = Logits(inputs)
    exact = logits.source.double().requires_grad_()
    (target,) = torch.autograd.grad(
        implementations.logits_eager(exact, logits.inputs.in_fp64()), exact
    )
    fresh = logits.restored()
    (got,) = torch.autograd.grad(compute_loss(fresh, logits.inputs), fresh)
    return ((got.double() - target).norm() / target.norm()).item()


@pytest.mark.parametrize(("name", "compute_loss"), named(OURS | OTHERS))
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_and_backward(benchmark, name, compute_loss, head, tokens):
    inputs = fresh_inputs(head, tokens)
    run_both(benchmark, name, compute_loss, inputs)
    if tokens == min(TOKENS):
        benchmark.extra_info["dlogits_error"] = gradient_error(compute_loss, inputs)


@pytest.mark.parametrize(("name", "compute_loss"), named(FIRST_HEAD))
@pytest.mark.parametrize("head", HEADS[:1])
@pytest.mark.parametrize("tokens", TOKENS)
def test_forward_and_backward_of_peers(benchmark, name, compute_loss, head, tokens):
    run_both(benchmark, name, compute_loss, fresh_inputs(head, tokens))


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("tokens", TOKENS)
def test_fastp3o_forward_and_backward_alone(benchmark, passes, dtype, head, tokens):
    logits = Logits(fresh_inputs(head, tokens, dtype))
    accesses = 1 if passes == "forward" else 2

    def forward(fresh: Tensor) -> Tensor:
        return OURS["fastp3o"](fresh, logits.inputs)

    def with_loss() -> tuple[Tensor, Tensor]:
        fresh = logits.restored()
        return forward(fresh), fresh

    def backward(pair: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        loss, fresh = pair
        return torch.autograd.grad(loss, fresh)

    case, bare, share = make_case("fastp3o", passes, logits, accesses), logits.copy(), accesses / 2
    if passes == "forward":
        measure(benchmark, case, logits.restored, forward, bare, share)
    else:
        measure(benchmark, case, with_loss, backward, bare, share)
