import time

import pytest
import torch

from benchmarks.peak_memory import PeakMemory
from fastp3o_kernels import Head, linear_logprobs
from fastp3o_kernels.head import scratch
from tests.kernels.problems import CHUNKED, DEVICE, budget_for, random_hidden_states, relative_error


def run(states, labels, weights, impl, **given):
    states = states.leaves()
    logprobs = linear_logprobs(states.hidden, states.head, labels, impl=impl, **given)
    (logprobs * weights).sum().backward()
    return logprobs.detach(), states.gradients()


@pytest.mark.parametrize("impl", CHUNKED)
@pytest.mark.parametrize(
    ("scale", "softcap"), [(0.1, 30.0), (3.0, 30.0), (30.0, 5.0), (100.0, 30.0)]
)
def test_a_soft_cap_is_as_exact_as_eager_for_small_logits_and_near_the_cap(impl, scale, softcap):
    """No difference of nearly equal numbers, neither in tanh nor in its slope."""
    states = random_hidden_states(40, 300, 16, DEVICE, scale=scale, softcap=softcap)
    torch.manual_seed(0)
    labels, weights = torch.randint(300, (40,), device=DEVICE), torch.randn(40, device=DEVICE)
    expected, expected_gradients = run(states.to(torch.float64), labels, weights.double(), "eager")
    eager, eager_gradients = run(states, labels, weights, "eager")
    chunked, gradients = run(states, labels, weights, impl)
    assert (chunked - expected).abs().max() <= 1.5 * (eager - expected).abs().max() + 1e-7
    for got, eager_gradient, target in zip(
        gradients, eager_gradients, expected_gradients, strict=True
    ):
        assert (got - target).norm() <= 1.5 * (
            eager_gradient - target
        ).norm() + 1e-7 * target.norm()


@pytest.mark.parametrize("impl", CHUNKED)
@pytest.mark.parametrize(
    "view", [lambda bias: bias[:, 0], lambda bias: bias[:1, 0].expand(67)], ids=["column", "one"]
)
def test_layouts_odd_vocabularies_and_a_bias_of_any_stride(impl, view):
    torch.manual_seed(0)
    hidden, weight = torch.randn(12, 9, device=DEVICE)[:, 1::2], torch.randn(4, 67, device=DEVICE).T
    bias = torch.randn(67, 2, device=DEVICE, requires_grad=True)
    labels = torch.randint(67, (13,), dtype=torch.int32, device=DEVICE)[1:]
    given = {"outputs": ("entropy",), "impl": impl, "memory_budget": budget_for(5, 67)}
    got = linear_logprobs(hidden, Head(weight, bias=view(bias)), labels, **given)
    logprobs = (hidden @ weight.T + view(bias)).log_softmax(-1)
    expected = (
        logprobs.gather(1, labels.long()[:, None]).squeeze(1),
        -(logprobs.exp() * logprobs).sum(1),
    )
    torch.testing.assert_close(got[:2], expected, rtol=1e-4, atol=1e-5)
    gradients = [
        torch.autograd.grad(values[0].sum() + 2 * values[1].sum(), bias)
        for values in (got, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_the_weights_gradient_is_summed_in_fp32():
    """apple/ml-cross-entropy #14: bf16 sums over chunks lose what is small next to them."""
    states = random_hidden_states(2000, 20, 4, DEVICE, torch.bfloat16)
    labels, weights = torch.randint(20, (2000,), device=DEVICE), torch.rand(2000, device=DEVICE)
    _, expected = run(states.to(torch.float64), labels, weights.double(), "eager")
    _, whole = run(states, labels, weights, None)
    _, chunked = run(states, labels, weights, None, memory_budget=budget_for(2, 20))
    assert (
        relative_error(chunked[1], expected[1])
        <= 1.5 * relative_error(whole[1], expected[1]) + 1e-4
    )


def hidden_weight_and_labels(
    N: int, D: int = 64, V: int = 1024
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, D, generator=generator).requires_grad_() for rows in (N, V))
    return hidden, weight, torch.randint(V, (N,), generator=generator)


def gradients(hidden, weight, labels):
    return torch.autograd.grad(linear_logprobs(hidden, weight, labels).sum(), (hidden, weight))


@pytest.fixture
def little_room(monkeypatch):
    """Room for the logits of 256 tokens stays between calls."""
    monkeypatch.setattr(scratch, "MOST_BYTES", 2**20)
    monkeypatch.setattr(scratch, "SPARE", {})


def test_time_is_linear_and_memory_flat_where_not_all_logits_are_kept(little_room):
    sizes = [hidden_weight_and_labels(N) for N in (4096, 16384)]
    turns: list[list[float]] = [[], []]
    for _ in range(6):  # in turns, the first of which warms up
        for inputs, own in zip(sizes, turns, strict=True):
            begun = time.process_time()
            gradients(*inputs)
            own.append(time.process_time() - begun)
    times, peaks = [min(own[1:]) for own in turns], []
    for inputs in sizes:
        scratch.SPARE.clear()
        with PeakMemory() as memory:
            gradients(*inputs)
        peaks.append(memory.peak - 4 * inputs[0].numel())  # its gradient
    assert times[1] <= 4.4 * times[0]
    assert peaks[1] <= peaks[0] + 100 * (16384 - 4096)


@pytest.mark.parametrize("outputs", [None, ("entropy",)])
def test_kept_logits_and_those_that_are_computed_again_give_the_same_bits(
    outputs, little_room, monkeypatch
):
    inputs = hidden_weight_and_labels(1500)

    def run():
        values = linear_logprobs(*inputs, outputs=outputs)
        loss = (values if outputs is None else values.logprobs + values.entropy).sum()
        return values, *torch.autograd.grad(loss, inputs[:2])

    some, *gradients_of_some = run()
    monkeypatch.setattr(scratch, "MOST_BYTES", 2**27)
    everything, *gradients_of_all = run()
    assert torch.equal(
        some if outputs is None else some.entropy,
        everything if outputs is None else everything.entropy,
    )
    assert all(map(torch.equal, gradients_of_some, gradients_of_all))
