"""Entropy, mean logit and the likeliest token: of logits, of a head in chunks, and within
linear_loss.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels import linear_logprobs, token_logprobs
from tests.kernels.problems import DEVICE, EXAMPLES, random_hidden_states, vocabularies

ALL = ("entropy", "mean_logit", "is_top")


def oracle(logits: torch.Tensor, labels: torch.Tensor):
    """The statistics by their definitions, one token at a time."""
    counts = labels != -100
    p = logits.softmax(1)
    entropy = torch.stack([-(row[row > 0] * row[row > 0].log()).sum() for row in p]) * counts
    logprobs = p.log().gather(1, labels.clamp(min=0)[:, None])[:, 0].masked_fill(~counts, 0.0)
    is_top = [
        bool(count and row[label] == row.max())
        for row, label, count in zip(p, labels, counts, strict=True)
    ]
    means = logits.detach().mean(1).masked_fill(~counts, 0.0)
    return logprobs, entropy, means, torch.tensor(is_top, device=logits.device)


def problem(N: int, V: int, seed: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(N, V, generator=generator)).to(dtype)
    labels = torch.randint(V, (N,), generator=generator)
    labels[::3] = logits[::3].argmax(1)
    labels[2::5] = -100
    return logits.to(DEVICE), labels.to(DEVICE), torch.randn(2, N, generator=generator).to(DEVICE)


@pytest.mark.parametrize("impl", ["eager", "triton"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    N=st.integers(1, 9),
    V=vocabularies(2, 90),
    temperature=st.sampled_from([1.0, 0.7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 10**6),
)
def test_outputs_of_logits_are_as_exact_as_their_dtype(impl, N, V, temperature, dtype, seed):
    logits, labels, weights = problem(N, V, seed, dtype)
    exact, leaf = (tensor.clone().requires_grad_() for tensor in (logits.double(), logits))
    expected = oracle(exact / temperature, labels)
    got = token_logprobs(leaf, labels, temperature=temperature, outputs=ALL, impl=impl)
    for mine, target in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), target.double(), rtol=1e-5, atol=1e-5)
    assert got.is_top.dtype == torch.bool
    (weights[0] * expected[0] + weights[1] * expected[1]).sum().backward()
    (weights[0] * got.logprobs + weights[1] * got.entropy).sum().backward()
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert (leaf.grad - exact.grad).norm() <= tolerance * (exact.grad.norm() + 1)
    assert not got.mean_logit.requires_grad


def test_the_gradient_of_the_entropy_alone(impl):
    logits, labels, weights = problem(7, 20, 0)
    exact, leaf = (tensor.clone().requires_grad_() for tensor in (logits.double(), logits))
    (oracle(exact, labels)[1] * weights[0]).sum().backward()
    (
        token_logprobs(leaf, labels, outputs=["entropy"], impl=impl).entropy * weights[0]
    ).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_tokens_of_probability_zero_and_far_apart_logits(impl):
    inf = float("inf")
    logits = torch.tensor(
        [[0.0, -inf, 1.0], [-inf, 5.0, -inf], [1e4, -1e4, 0.0]], device=DEVICE, requires_grad=True
    )
    labels = torch.tensor([2, 1, 1], device=DEVICE)
    got = token_logprobs(logits, labels, outputs=("is_top", "entropy"), impl=impl)
    p = torch.tensor([0.0, 1.0]).softmax(0)
    torch.testing.assert_close(got.entropy.cpu(), torch.tensor([-(p * p.log()).sum(), 0.0, 0.0]))
    assert got.is_top.tolist() == [True, True, False]
    assert got.mean_logit is None
    got.entropy.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("value", [-float("inf"), float("nan")])
@pytest.mark.parametrize("outputs", [None, ALL])
def test_ignored_rows_give_nothing_and_others_hide_no_nan(impl, value, outputs):
    logits = torch.randn(4, 20, device=DEVICE)
    logits[1] = value
    logits[3, 7] = float("nan")
    logits.requires_grad_()
    labels = torch.tensor([4, -100, 5, 3], device=DEVICE)
    got = token_logprobs(logits, labels, outputs=outputs, impl=impl)
    found = got if outputs else [got]
    sum(values.sum() for values in found[:2]).backward()
    assert found[0].isnan().tolist() == [False, False, False, True]
    assert not any(values[1] for values in found)
    assert logits.grad.any(1).tolist() == [True, False, True, True]


@pytest.mark.parametrize("from_hidden", [False, True])
def test_results_may_be_changed_in_place(impl, from_hidden):
    states = random_hidden_states(6, 20, 4, DEVICE)
    labels, mask = (
        torch.arange(6, device=DEVICE),
        torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], device=DEVICE),
    )
    found = []
    for change in (torch.mul, torch.Tensor.mul_):
        leaves = states.leaves()
        if from_hidden:
            got = linear_logprobs(leaves.hidden, leaves.head, labels, outputs=ALL, impl=impl)
        else:
            got = token_logprobs(leaves.logits(), labels, outputs=ALL, impl=impl)
        values = [change(value, mask) for value in got[:3]]
        sum(value.sum() for value in values).backward()
        found.append([*(value.detach() for value in values), leaves.hidden.grad])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)
