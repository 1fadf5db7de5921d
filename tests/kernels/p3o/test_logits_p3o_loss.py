from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels import P3OSettings, logits_p3o_loss, sequence_logprobs, token_logprobs
from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.p3o import pair_kernel
from fastp3o_kernels.rows import logits_kernel
from tests.kernels.problems import (
    CLIPPINGS,
    DEVICE,
    EXAMPLES,
    oracle,
    ragged_groups,
    random_pairs,
    relative_error,
    vocabularies,
)

JOINT = P3OSettings(clipping="joint")


def run(pairs, clipping, impl, **settings):
    logits = pairs.logits.detach().requires_grad_()
    output = pairs.call(logits_p3o_loss, logits, P3OSettings(clipping=clipping, **settings), impl=impl)
    output.loss.backward()
    return output, logits.grad


@settings(max_examples=20, deadline=None)
@given(
    groups=ragged_groups(),
    V=st.integers(2, 40),
    clipping=st.sampled_from(CLIPPINGS),
    kl_reward=st.sampled_from(["current", "rollout"]),
    masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_eager_is_the_paper_in_fp64(groups, V, clipping, kl_reward, masked, seed):
    K, lengths = groups
    pairs = random_pairs(lengths, V, DEVICE, K=K, seed=seed, masked=masked).to(torch.float64)
    output, gradient = run(pairs, clipping, "eager", kl_reward=kl_reward)
    logits = pairs.logits.detach().requires_grad_()
    expected = oracle(pairs, logits, clipping, kl_reward)
    expected.backward()
    torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-9, atol=1e-12)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    groups=ragged_groups(),
    V=vocabularies(2, 300),
    clipping=st.sampled_from(CLIPPINGS),
    kl_reward=st.sampled_from(["current", "rollout"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    masked=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_triton_is_as_exact_as_eager(groups, V, clipping, kl_reward, dtype, masked, seed):
    K, lengths = groups
    pairs = random_pairs(lengths, V, DEVICE, K=K, seed=seed, masked=masked)
    pairs.logits = pairs.logits.to(dtype)
    expected, expected_gradient = run(pairs.to(torch.float64), clipping, "eager", kl_reward=kl_reward)
    eager, eager_gradient = run(pairs, clipping, "eager", kl_reward=kl_reward)
    triton, triton_gradient = run(pairs, clipping, "triton", kl_reward=kl_reward)
    error = abs(triton.loss.item() - expected.loss.item())
    assert error <= 4 * abs(eager.loss.item() - expected.loss.item()) + 1e-5 * (1 + sum(lengths))
    # The interpreter cuts off where hardware rounds to 16 bits.
    floor = torch.finfo(dtype).eps if INTERPRET else 0.0
    assert relative_error(triton_gradient, expected_gradient) <= (
        2 * relative_error(eager_gradient, expected_gradient) + floor + 2e-4
    )
    assert triton.metrics.keys() == eager.metrics.keys()
    for name, value in eager.metrics.items():
        torch.testing.assert_close(triton.metrics[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")
    assert triton.counts == eager.counts


@pytest.mark.parametrize("clipping", CLIPPINGS)
def test_logits_of_scale_100_and_minus_infinity(clipping, impl):
    pairs = random_pairs([3, 4, 1, 2], 60, DEVICE, scale=100.0)
    pairs.logits[:, 50:] = -float("inf")
    pairs.labels %= 50
    with torch.no_grad():
        logprobs = pairs.logits.double().log_softmax(-1).gather(1, pairs.labels[:, None]).squeeze(1)
        sums = torch.stack([part.sum() for part in logprobs.split([3, 4, 1, 2])]).view(2, 2).float()
    pairs.old_logprobs, pairs.ref_logprobs, pairs.old_token_logprobs = sums + 0.05, sums, logprobs.float()
    expected, expected_gradient = run(pairs.to(torch.float64), clipping, "eager")
    output, gradient = run(pairs, clipping, impl)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3, abs=1e-2)
    assert gradient.isfinite().all()
    assert relative_error(gradient, expected_gradient) < 2e-3


@pytest.mark.parametrize("clipping", ["joint", "separate", "none"])
def test_the_ratio_of_equal_log_probs_is_exactly_one(clipping, impl):
    pairs = random_pairs([3, 40, 7, 2], 30, DEVICE)
    logprobs = token_logprobs(pairs.logits, pairs.labels, impl=impl)
    pairs.old_logprobs = sequence_logprobs(logprobs, pairs.cu_seqlens, impl=impl).view(-1, 2)
    output, _ = run(pairs, clipping, impl)
    assert output.metrics["ratio_mean"] == output.metrics["ratio_max"] == 1
    assert output.metrics["clip_fraction"] == 0


def test_rows_without_gradient_are_not_read_in_backward():
    pairs = random_pairs([3, 4, 2, 2], 40, DEVICE)
    pairs.rewards[0] = 1.0
    logits = pairs.logits.clone().requires_grad_()
    output = pairs.call(logits_p3o_loss, logits, P3OSettings(clipping="none", kl_coef=0.0), impl="triton")
    logits.data[:7] = float("nan")
    output.loss.backward()
    assert (logits.grad[:7] == 0).all()
    assert (logits.grad[7:] != 0).any()
    assert output.metrics["zero_gradient_fraction"] == 0.5


def test_launches(monkeypatch):
    launched = []

    class Counting:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launched.append(self.kernel.__name__)
            return self.kernel[grid]

    row_kernels, pair_kernels = ("logprobs_kernel", "dlogits_kernel"), ("pair_kernel", "results_kernel")
    for module, name in [*product([logits_kernel], row_kernels), *product([pair_kernel], pair_kernels)]:
        monkeypatch.setattr(module, name, Counting(getattr(module, name)))
    pairs = random_pairs([3, 4], 40, DEVICE)
    logits = pairs.logits.requires_grad_()
    output = pairs.call(logits_p3o_loss, logits, JOINT, impl="triton")
    assert launched == ["logprobs_kernel", "pair_kernel", "results_kernel"]
    output.loss.backward()
    assert launched[3:] == ["dlogits_kernel"]


def test_the_incoming_gradient_scales(impl):
    pairs = random_pairs([3, 4], 40, DEVICE)
    _, gradient = run(pairs, "joint", impl)
    logits = pairs.logits.detach().requires_grad_()
    (-2.5 * pairs.call(logits_p3o_loss, logits, JOINT, impl=impl).loss).backward()
    torch.testing.assert_close(logits.grad, -2.5 * gradient)


def test_in_place_backward_gives_the_same():
    pairs = random_pairs([3, 4], 40, DEVICE)
    _, expected = run(pairs, "joint", "triton")
    logits = pairs.logits.clone().requires_grad_() * 1.0
    logits.retain_grad()
    output = pairs.call(logits_p3o_loss, logits, JOINT, impl="triton", inplace_backward=True)
    output.loss.backward(retain_graph=True)
    assert torch.equal(logits.grad, expected)
    assert torch.equal(logits, expected)
    with pytest.raises(RuntimeError):
        output.loss.backward()


def test_without_a_gradient_nothing_is_saved(impl):
    pairs = random_pairs([3, 4], 40, DEVICE)
    assert not pairs.call(logits_p3o_loss, pairs.logits, JOINT, impl=impl).loss.requires_grad


@pytest.mark.gpu
def test_a_real_vocabulary_in_bf16():
    pairs = random_pairs([100, 28, 60, 68], 128256, DEVICE)
    pairs.logits = pairs.logits.bfloat16()
    expected, expected_gradient = run(pairs.to(torch.float64), "joint", "eager")
    output, gradient = run(pairs, "joint", "triton")
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3)
    assert relative_error(gradient, expected_gradient) < 5e-3
