"""Every kernel on small cases, against the fp64 arithmetic of the eager implementation.

    compute-sanitizer python -m benchmarks.small_case    # for a memory checker

`tests/fastp3o/test_smoke_on_gpu.py` runs each case by its name.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.shapes import TRIAL
from fastp3o_kernels import (
    Head,
    P3OSettings,
    linear_logprobs,
    linear_p3o_loss,
    logits_p3o_loss,
    sequence_logprobs,
    token_logprobs,
)
from fastp3o_kernels.decoding import LayerCache, Slots, decode_attention, response_keys, sample_tokens
from fastp3o_kernels.p3o.settings import CLIPPING

LENGTHS, V, D = [3, 5, 1, 7], 203 if TRIAL else 5003, 64
# Bytes of scratch for each of the vocabulary: the head works in several chunks.
BUDGET = 48
OUTPUTS = ("entropy", "mean_logit")
# Largest relative errors: of what is computed in fp32, and of gradients that are rounded to the inputs' dtype.
FP32, ROUNDED = 1e-4, {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class Comparison(NamedTuple):
    found: Tensor
    exact: Tensor
    bound: float

    @property
    def error(self) -> float:
        """Relative, of the whole tensor; absolute for a number below 1, such as a mean of terms of both signs."""
        exact = self.exact.double()
        least = 1e-6 if exact.dim() else 1.0
        return ((self.found.double() - exact).norm() / exact.norm().clamp(min=least)).item()


class Problem(NamedTuple):
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor  # [V]
    labels: Tensor  # [N]
    cu_seqlens: Tensor  # [5]
    pairs: tuple[Tensor, Tensor, Tensor]  # old and reference log-probs and rewards, [2, 2] each
    old_token_logprobs: Tensor  # [N]

    def in_fp64(self) -> "Problem":
        floating = {name: value.double() for name, value in self._asdict().items() if is_floating(value)}
        return self._replace(**floating, pairs=tuple(tensor.double() for tensor in self.pairs))

    def head(self) -> Head:
        return Head(self.weight, bias=self.bias, softcap=30.0)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        leaves = self.hidden, self.weight, self.bias
        for leaf in leaves:
            leaf.requires_grad_()
        return leaves


def is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def make_problem(device: torch.device, dtype: torch.dtype) -> Problem:
    """Drawn on the CPU, so that every device has the same."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    N = sum(LENGTHS)
    hidden, weight, bias = randn(N, D).to(dtype), (randn(V, D) / 4).to(dtype), randn(V)
    labels = torch.randint(V, (N,), generator=generator).to(device)
    cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0, dtype=torch.int32)
    own = linear_logprobs(hidden, Head(weight, bias=bias, softcap=30.0), labels, impl="eager")
    sums = sequence_logprobs(own, cu_seqlens, impl="eager").view(-1, 2)
    pairs = sums + 0.05 * randn(2, 2), sums + randn(2, 2), randn(2, 2)
    return Problem(hidden, weight, bias, labels, cu_seqlens, pairs, own + 0.05 * randn(N))


def rows_of_logits(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Log-probs and their gradient; with statistics, and the gradient of the entropy."""
    problem = make_problem(device, dtype)
    logits = (problem.hidden @ problem.weight.T).detach()
    for outputs in (None, OUTPUTS):
        found, exact = (
            token_values(given.requires_grad_(), problem.labels, outputs, impl)
            for given, impl in ((logits.clone(), "triton"), (logits.double(), "eager"))
        )
        yield from compare(found, exact, dtype)


def token_values(logits: Tensor, labels: Tensor, outputs: tuple[str, ...] | None, impl: str) -> list[Tensor]:
    """Values, and the gradient of their squares' sum."""
    values = token_logprobs(logits, labels, outputs=outputs, impl=impl)
    values = [values] if outputs is None else [values.logprobs, values.entropy]
    return [*values, *torch.autograd.grad(sum(value.square().sum() for value in values), logits)]


def sums_of_responses(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    problem = make_problem(device, dtype)
    found = sequence_logprobs(problem.old_token_logprobs, problem.cu_seqlens, impl="triton")
    yield Comparison(found, sequence_logprobs(problem.old_token_logprobs.double(), problem.cu_seqlens), FP32)


def head_in_chunks(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Log-probs, entropies and gradients, from hidden states and the head."""

    def values(problem: Problem, **settings: object) -> list[Tensor]:
        leaves = problem.leaves()
        found = linear_logprobs(problem.hidden, problem.head(), problem.labels, outputs=OUTPUTS, **settings)
        loss = found.logprobs.square().sum() + found.entropy.sum()
        return [found.logprobs, found.entropy, *torch.autograd.grad(loss, leaves)]

    problem = make_problem(device, dtype)
    exact = values(problem.in_fp64(), impl="eager")
    yield from compare(values(problem, impl="triton", memory_budget=BUDGET * (V + 5)), exact, dtype)


def p3o_losses(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """From hidden states and from logits, on and off policy. Twice the loss: the backward pass has a factor."""
    for clipping in CLIPPING:
        for on_policy in (False, True):
            problem = make_problem(device, dtype)
            hidden = p3o_from_hidden(problem, clipping, on_policy, impl="triton", memory_budget=BUDGET * (V + 5))
            yield from compare(hidden, p3o_from_hidden(problem.in_fp64(), clipping, on_policy, impl="eager"), dtype)
            logits = (problem.hidden @ problem.weight.T).detach()
            found = p3o_from_logits(problem, logits, clipping, on_policy, impl="triton")
            exact = p3o_from_logits(problem.in_fp64(), logits.double(), clipping, on_policy, impl="eager")
            yield from compare(found, exact, dtype)


def arguments(problem: Problem, clipping: str, on_policy: bool) -> tuple[tuple, dict[str, Tensor]]:
    old, ref, rewards = problem.pairs
    given = problem.labels, problem.cu_seqlens, None if on_policy else old, ref, rewards, P3OSettings(clipping=clipping)
    more = {"old_token_logprobs": problem.old_token_logprobs} if clipping == "token" and not on_policy else {}
    return given, more


def p3o_from_hidden(problem: Problem, clipping: str, on_policy: bool, **settings: object) -> list[Tensor]:
    given, more = arguments(problem, clipping, on_policy)
    leaves = problem.leaves()
    loss = linear_p3o_loss(problem.hidden, problem.head(), *given, **more, **settings).loss
    return [loss, *torch.autograd.grad(2 * loss, leaves)]


def p3o_from_logits(problem: Problem, logits: Tensor, clipping: str, on_policy: bool, **settings: object) -> list:
    given, more = arguments(problem, clipping, on_policy)
    logits = logits.clone().requires_grad_()
    loss = logits_p3o_loss(logits, *given, **more, **settings).loss
    return [loss, *torch.autograd.grad(2 * loss, logits)]


def decoding_step(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    """Attention of one token of each of two responses to two prompts, one longer than a program takes; a slot idles."""
    generator = torch.Generator().manual_seed(0)
    P, R, Hkv, H, D = 2, 5, 2, 4, 16

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    tensors = [randn(R, H, D), randn(R, Hkv, D), randn(R, Hkv, D)]
    cached = [randn(P, Hkv, 300, D), randn(P, Hkv, 300, D), randn(R, Hkv, 10, D), randn(R, Hkv, 10, D)]
    response, lengths = torch.tensor([3, 0, 4, 2, 1], device=device), torch.tensor([300, 7, 0], device=device)
    steps, busy = torch.tensor([0, 4, 0, 9, 2], device=device), response < 4

    def attended(dtype: torch.dtype, impl: str, **settings: object) -> Tensor:
        cache = LayerCache(*(tensor.to(dtype, copy=True) for tensor in cached))
        slots = Slots(response, lengths, steps, responses_per_prompt=2)
        given = (tensor.to(dtype) for tensor in tensors)
        return decode_attention(*given, cache, slots, scale=D**-0.5, impl=impl, **settings)[busy]

    for settings in ({}, {"window": 40, "softcap": 20.0}):
        exact = attended(torch.float64, "eager", **settings)
        yield Comparison(attended(dtype, "triton", **settings), exact, ROUNDED[dtype])


def drawn_tokens(device: torch.device, dtype: torch.dtype) -> Iterator[Comparison]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, V, generator=generator).to(device)
    keys, steps = response_keys(5, torch.arange(9), 1)[:, 0].to(device), torch.arange(9, device=device)
    found, exact = (sample_tokens(logits, keys, steps, impl=impl) for impl in ("triton", "eager"))
    yield Comparison(found.tokens, exact.tokens, 0.0)
    yield Comparison(found.logprobs, exact.logprobs, FP32)


def compare(found: list[Tensor], exact: list[Tensor], dtype: torch.dtype) -> Iterator[Comparison]:
    """Results in fp32 have its errors, gradients that are rounded those of the dtype."""
    for one, other in zip(found, exact, strict=True):
        rounded = one.dtype != torch.float32 or one.dim() > 1 or dtype != torch.float32
        yield Comparison(one, other, ROUNDED[dtype] if rounded and one.dim() > 0 else 10 * FP32)


CASES: dict[str, Callable[[torch.device, torch.dtype], Iterator[Comparison]]] = {
    case.__name__: case
    for case in (rows_of_logits, sums_of_responses, head_in_chunks, p3o_losses, decoding_step, drawn_tokens)
}


def check(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises AssertionError where a case is further from fp64 than it may be."""
    for number, comparison in enumerate(CASES[name](device, dtype)):
        found = comparison.error
        assert found <= comparison.bound, (
            f"{name}, {dtype}, result {number}: error {found:.1e} > {comparison.bound:.1e}"
        )


def main() -> None:
    for name in CASES:
        for dtype in (torch.bfloat16, torch.float16):
            check(name, torch.device("cuda"), dtype)
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
