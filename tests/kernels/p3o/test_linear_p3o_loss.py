from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peak_memory import PeakMemory
from fastp3o_kernels import P3OSettings, linear_logprobs, linear_p3o_loss, sequence_logprobs
from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.rows.oracle import ROWS_AT_ONCE
from tests.kernels.interpreted import counted_launches
from tests.kernels.problems import (
    CHUNKED,
    CLIPPINGS,
    DEVICE,
    EXAMPLES,
    GPU_ARITHMETIC,
    as_on_a_gpu,
    budget_for,
    oracle,
    policy_of_performance_measurements,
    ragged_groups,
    random_hidden_states,
    random_pairs,
    relative_error,
    rounded_gradients_of_logits,
    vocabularies,
)
from tests.pairwise import pairwise

LENGTHS = [3, 4, 9, 2, 1, 1, 12, 20]
V, D, N = 50, 8, sum(LENGTHS)


def problem(
    lengths=LENGTHS, vocabulary=V, dtype=torch.float32, seed=0, moved=0.3, K=2, masked=False, apart=None, **settings
):
    states = random_hidden_states(sum(lengths), vocabulary, D, DEVICE, dtype, seed=seed, **settings)
    logits = states.to(torch.float64).logits()
    given = {"K": K, "seed": seed, "moved": moved, "masked": masked, "apart": apart}
    return states, random_pairs(lengths, vocabulary, DEVICE, logits=logits, **given)


def compute_loss(states, pairs, clipping="joint", impl=None, *, kl_reward="current", kl_coef=0.05, own=False, **given):
    """own: the old log-probs are the policy's own, and not given."""
    known, old = pairs.known(P3OSettings(clipping=clipping, kl_reward=kl_reward, kl_coef=kl_coef))
    if own:
        labels, cu_seqlens, _, *rest = known
        known, old["old_token_logprobs"] = (labels, cu_seqlens, None, *rest), None
    return linear_p3o_loss(states.hidden, states.head, *known, **old, impl=impl, **given)


def run(states, pairs, clipping="joint", impl=None, incoming=1.0, **given):
    leaves = states.leaves()
    output = compute_loss(leaves, pairs, clipping, impl, **given)
    (incoming * output.loss).backward()
    return output, leaves.gradients()


def sampled_by(states, pairs):
    """The same pairs, sampled by this very policy."""
    logprobs = linear_logprobs(
        states.hidden,
        states.head,
        pairs.labels,
        cu_seqlens=pairs.cu_seqlens,
        responses_per_prompt=pairs.rewards.shape[1],
    )
    sums = sequence_logprobs(logprobs, pairs.cu_seqlens, impl="eager").view(pairs.rewards.shape)
    return replace(pairs, old_logprobs=sums, old_token_logprobs=logprobs)


@settings(max_examples=25, deadline=None)
@given(
    groups=ragged_groups(),
    vocabulary=st.integers(2, 40),
    clipping=st.sampled_from(CLIPPINGS),
    kl_reward=st.sampled_from(["current", "rollout"]),
    held=st.integers(1, 60),
    impl=st.sampled_from(["eager", None]),
    masked=st.booleans(),
    apart=st.sampled_from([None, 0.5, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_paper_in_fp64(groups, vocabulary, clipping, kl_reward, held, impl, masked, apart, seed):
    K, lengths = groups
    head = {"bias": True, "softcap": 6.0, "temperature": 1.3}
    states, pairs = problem(lengths, vocabulary, torch.float64, seed, K=K, masked=masked, apart=apart, **head)
    pairs = pairs.to(torch.float64)
    budget = 2 * budget_for(held, vocabulary)
    output, gradients = run(states, pairs, clipping, impl, kl_reward=kl_reward, memory_budget=budget)
    leaves = states.leaves()
    expected = oracle(pairs, leaves.logits(), clipping, kl_reward)
    expected.backward()
    torch.testing.assert_close(output.loss, expected.detach(), rtol=1e-9, atol=1e-12)
    for got, target in zip(gradients, leaves.gradients(), strict=True):
        torch.testing.assert_close(got, target, rtol=1e-9, atol=1e-12)


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    groups=ragged_groups(),
    vocabulary=vocabularies(2, 90),
    clipping=st.sampled_from(CLIPPINGS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    impl=st.sampled_from(CHUNKED),
    held=st.integers(1, 60),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    masked=st.booleans(),
    apart=st.sampled_from([None, 0.5, 30.0]),
    gpu=st.sampled_from(GPU_ARITHMETIC),
    seed=st.integers(0, 10**6),
)
def test_as_exact_as_eager_at_every_budget(
    groups, vocabulary, clipping, dtype, impl, held, bias, softcap, masked, apart, gpu, seed
):
    K, lengths = groups
    given = {"K": K, "bias": bias, "softcap": softcap, "masked": masked, "apart": apart}
    states, pairs = problem(lengths, vocabulary, dtype, seed, **given)
    expected, expected_gradients = run(states.to(torch.float64), pairs.to(torch.float64), clipping, "eager")
    with rounded_gradients_of_logits(dtype) if gpu else nullcontext():
        eager, eager_gradients = run(states, pairs, clipping, "eager")
    with as_on_a_gpu(dtype) if gpu else nullcontext():
        chunked, gradients = run(states, pairs, clipping, impl, memory_budget=budget_for(held, vocabulary))
    size = 1e-5 * (1 + sum(lengths))
    assert abs(chunked.loss - expected.loss) <= 2 * abs(eager.loss - expected.loss) + size
    for got, eager_gradient, target in zip(gradients, eager_gradients, expected_gradients, strict=True):
        assert got.dtype == dtype
        assert (got - target).norm() <= 2 * (eager_gradient - target).norm() + 1e-4 * target.norm() + size
    for name, value in eager.metrics.items():
        torch.testing.assert_close(
            chunked.metrics[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert chunked.counts == eager.counts


@pytest.mark.parametrize(("clipping", "impl", "held"), pairwise(CLIPPINGS, [*CHUNKED, "eager"], [1000, 5]))
def test_old_log_probs_of_its_own_are_those_that_it_computes(clipping, impl, held):
    """The loss, its gradients and metrics are those with the policy's log-probs given as the old ones."""
    states, pairs = problem(bias=True, softcap=5.0, temperature=0.7, apart=0.3)
    pairs = sampled_by(states, pairs)
    budget = budget_for(held, V)
    expected, expected_gradients = run(states, pairs, clipping, "eager")
    output, gradients = run(states, pairs, clipping, impl, own=True, memory_budget=budget, incoming=-1.5)
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    for got, target in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, -1.5 * target, rtol=1e-4, atol=1e-5)
    assert output.metrics["ratio_mean"] == output.metrics["ratio_max"] == 1
    assert output.metrics["clip_fraction"] == 0
    for name, value in expected.metrics.items():
        torch.testing.assert_close(output.metrics[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("clipping", "impl", "dtype", "held"),
    pairwise(["joint", "separate", "none"], CHUNKED, [torch.float32, torch.bfloat16], [1000, 30, 7, 2]),
)
def test_the_ratio_of_two_evaluations_of_the_same_weights_is_exactly_one(clipping, impl, dtype, held):
    states, pairs = problem(dtype=dtype)
    budget = budget_for(held, V)
    with torch.no_grad():
        logprobs = linear_logprobs(
            states.hidden, states.head, pairs.labels, cu_seqlens=pairs.cu_seqlens, memory_budget=budget, impl=impl
        )
    pairs.old_logprobs = sequence_logprobs(logprobs, pairs.cu_seqlens, impl=impl).view(-1, 2)
    output, _ = run(states, pairs, clipping, impl, memory_budget=budget)
    assert output.metrics["ratio_mean"] == output.metrics["ratio_max"] == 1
    assert output.metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("impl", "own", "needed", "held"),
    pairwise(CHUNKED, [False, True], [(1, 1, 6), (1, 0, 4), (0, 1, 4), (0, 0, 2)], [1000, 32]),
)
def test_only_the_products_that_are_needed(impl, own, needed, held):
    """F = N V D; whole pairs in chunks need their logits once, whatever the number of chunks."""
    hidden, weight, products = needed
    states, pairs = problem()
    states = states.leaves(hidden=bool(hidden), weight=bool(weight))
    with FlopCounterMode(display=False) as counter:
        output = compute_loss(states, pairs, "none", impl, memory_budget=budget_for(held, V), own=own)
        forward = counter.get_total_flops()
        if hidden or weight:
            output.loss.backward()
    # The gradients come with the forward pass.
    assert forward == counter.get_total_flops() == products * N * V * D


@pytest.mark.parametrize("impl", CHUNKED)
def test_a_pair_beyond_the_budget_is_computed_again_only_where_it_does_not_fit(impl):
    lengths, held = [30, 25], 20
    states, pairs = problem(lengths)
    with FlopCounterMode(display=False) as counter:
        run(states, pairs, "none", impl, memory_budget=budget_for(held, V))
    assert counter.get_total_flops() == (6 * 55 + 2 * (55 - held)) * V * D


@pytest.mark.parametrize(("impl", "held", "gpu"), pairwise(CHUNKED, [1000, 32, 6], GPU_ARITHMETIC))
def test_pairs_without_a_coefficient_take_no_part_in_the_gradients_products_on_a_cpu(impl, held, gpu):
    """On a GPU the host would have to wait for their number: they are rows of zeros."""
    states, pairs = problem()
    pairs.rewards[[0, 2]] = 1.0
    left = N if gpu else N - sum(LENGTHS[0:2] + LENGTHS[4:6])
    budget = budget_for(held, V)
    leaves = states.leaves()
    with as_on_a_gpu(torch.float32) if gpu else nullcontext(), FlopCounterMode(display=False) as counter:
        output = compute_loss(leaves, pairs, "none", impl, kl_coef=0.0, memory_budget=budget)
        output.loss.backward()
    again = {1000: 0, 32: 0, 6: (7 - 6) + (11 - 6) + (32 - 6)}[held]
    assert counter.get_total_flops() == (2 * (N + again) + 4 * left) * V * D
    assert output.metrics["zero_gradient_fraction"] == 0.5
    _, expected = run(states, pairs, "none", "eager", kl_coef=0.0)
    for got, target in zip(leaves.gradients(), expected, strict=True):
        torch.testing.assert_close(got, target, rtol=1e-4, atol=1e-6)
    assert (leaves.hidden.grad[:7] == 0).all()


@pytest.mark.parametrize("impl", CHUNKED)
def test_memory_stays_within_the_budget(impl):
    lengths, vocabulary = [20, 30, 25, 25] * 4, 800
    tokens = sum(lengths)
    states, pairs = problem(lengths, vocabulary)
    leaves, budget = states.leaves(), budget_for(64, vocabulary)
    with PeakMemory() as memory:
        compute_loss(leaves, pairs, "joint", impl, memory_budget=budget).loss.backward()
    gradients = 4 * (tokens * D + vocabulary * D)
    vectors_and_temporaries = 4 * 30 * tokens + 3 * 4 * ROWS_AT_ONCE * vocabulary
    assert memory.largest <= budget
    assert memory.peak <= budget + gradients + vectors_and_temporaries < 0.7 * 8 * tokens * vocabulary


def test_the_measure_of_memory_sees_all_logits_at_once():
    lengths = [20, 30, 25, 25] * 4
    states, pairs = problem(lengths, 2000)
    with PeakMemory() as memory:
        run(states, pairs, "joint", "eager")
    assert memory.largest >= 4 * sum(lengths) * 2000
    assert memory.peak >= 2 * 4 * sum(lengths) * 2000


@pytest.mark.parametrize("impl", [*CHUNKED, "eager"])
def test_the_incoming_gradient_scales(impl):
    states, pairs = problem()
    _, expected = run(states, pairs, impl=impl)
    _, gradients = run(states, pairs, impl=impl, incoming=-2.5)
    for got, target in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got, -2.5 * target)


def test_gradients_of_fp16_products_survive_a_loss_scale():
    """Coefficients of 1 / 2P times probabilities of 1e-5 are below what fp16 holds before the loss scale comes."""
    lengths, vocabulary = [2, 3] * 40, 3000
    states, pairs = problem(lengths, vocabulary, torch.float16, scale=1.0)
    scale = 2.0**14
    _, expected = run(states.to(torch.float64), pairs.to(torch.float64), "none", "eager", incoming=scale)
    for impl in CHUNKED:
        _, gradients = run(states, pairs, "none", impl, incoming=scale)
        for got, target in zip(gradients, expected, strict=True):
            assert relative_error(got, target) < 2e-3


@pytest.mark.parametrize(("impl", "sampled_by_it", "factor"), pairwise(CHUNKED, [False, True], [1e-5, 1.0, 1e5]))
def test_fp16_gradients_keep_their_digits_whatever_the_size_of_rewards(factor, sampled_by_it, impl):
    """Small enough that probabilities times advantages are nothing in fp16, large enough that these are infinite."""
    states, pairs = problem([2, 3] * 8, 3000, torch.float16, scale=0.05)
    pairs.rewards = factor * pairs.rewards
    if sampled_by_it:
        pairs = sampled_by(states, pairs)
    given = {"kl_coef": 0.0, "own": sampled_by_it, "incoming": 2.0**10 / factor}
    _, expected = run(states.to(torch.float64), pairs.to(torch.float64), "none", "eager", **given)
    with as_on_a_gpu(torch.float16):
        _, gradients = run(states, pairs, "none", impl, memory_budget=budget_for(20, 3000), **given)
    for got, target in zip(gradients, expected, strict=True):
        assert relative_error(got, target) < 3e-3


@pytest.mark.parametrize("impl", CHUNKED)
def test_a_second_backward_pass_is_refused(impl):
    states, pairs = problem()
    loss = compute_loss(states.leaves(), pairs, impl=impl).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="handed out by the first backward pass"):
        loss.backward()


@pytest.mark.parametrize("clipping", CLIPPINGS)
@pytest.mark.parametrize("impl", CHUNKED)
def test_a_shift_of_the_rewards_per_prompt_changes_nothing(clipping, impl):
    states, pairs = problem()
    pairs.rewards = (pairs.rewards * 16).round() / 16
    plain, gradients = run(states, pairs, clipping, impl, memory_budget=budget_for(16, V))
    pairs.rewards = pairs.rewards + torch.tensor([[1024.0], [-7.5], [0.25], [3.0]], device=DEVICE)
    shifted, shifted_gradients = run(states, pairs, clipping, impl, memory_budget=budget_for(16, V))
    assert torch.equal(plain.loss, shifted.loss)
    assert all(torch.equal(a, b) for a, b in zip(gradients, shifted_gradients, strict=True))


def test_autocast_gives_fp32_weights_fp32_gradients():
    states, pairs = problem()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        _, gradients = run(states, pairs, memory_budget=budget_for(16, V))
    _, expected = run(states.to(torch.bfloat16).to(torch.float64), pairs.to(torch.float64), impl="eager")
    for got, target in zip(gradients, expected, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(got, target) < 1e-2


@pytest.mark.skipif(not INTERPRET, reason="launches are counted in the interpreter")
@pytest.mark.parametrize("own", [False, True])
def test_launches(monkeypatch, own):
    states, pairs = problem()
    with counted_launches(monkeypatch) as launches:
        run(states, pairs, impl="triton", own=own)
    once = ("logprobs_kernel", "pair_kernel", "results_kernel", "dlogits_kernel")
    assert launches == dict.fromkeys(once, 1) | {"scale_kernel": 1}


def test_token_clipping_needs_old_log_probs_of_both_kinds_or_of_none():
    states, pairs = problem()
    (labels, cu_seqlens, old, *rest), _ = pairs.known(P3OSettings(clipping="token"))
    policy = states.hidden, states.head, labels, cu_seqlens
    linear_p3o_loss(*policy, None, *rest)
    with pytest.raises(ValueError, match="needs old_token_logprobs"):
        linear_p3o_loss(*policy, old, *rest)
    with pytest.raises(ValueError, match="both are None"):
        linear_p3o_loss(*policy, None, *rest, old_token_logprobs=pairs.old_token_logprobs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": torch.zeros(3, 2)}, r"rewards must have shape \[4, 2\]"),
        ({"cu_seqlens": torch.arange(9)}, r"cu_seqlens\[8\] = 8 must be the number of tokens, 52"),
        ({"settings": {"clipping": "both"}}, "clipping must be one of joint, separate, none, token, got 'both'"),
        ({"memory_budget": 7}, "memory_budget of 7 bytes is less than one row"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    states, pairs = problem()
    given = {"hidden": states.hidden, "head": states.head, "settings": {}} | vars(pairs) | change
    del given["logits"], given["old_token_logprobs"]
    with pytest.raises(ValueError, match=message):
        linear_p3o_loss(**(given | {"settings": P3OSettings(**given["settings"])}))


def test_the_log_ratio_of_128_tokens_is_exact_at_every_budget():
    """The loss's own metric, against fp64: a ratio off by 0.002 would show."""
    hidden, weight, moved, labels = policy_of_performance_measurements()
    cu_seqlens = torch.arange(0, 513, 128, dtype=torch.int32)
    sums = []
    for matrix in (weight, moved):
        logprobs = (hidden.double() @ matrix.double().T).log_softmax(-1).gather(1, labels[:, None]).squeeze(1)
        sums.append(logprobs.view(4, 128).sum(1).view(2, 2))
    expected = (sums[1] - sums[0]).exp()
    for held in (50, 300, 600):
        budget = budget_for(held, 16000)
        with torch.no_grad():
            given = {"cu_seqlens": cu_seqlens, "memory_budget": budget}
            old = sequence_logprobs(linear_logprobs(hidden, weight, labels, **given), cu_seqlens.to(DEVICE)).view(2, 2)
            output = linear_p3o_loss(
                hidden, moved, labels, cu_seqlens, old, old, torch.zeros_like(old), memory_budget=budget
            )
        assert abs(output.metrics["ratio_mean"] - expected.mean()) < 0.002
        assert abs(output.metrics["ratio_max"] - expected.max()) < 0.002


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("held", [100, 10**6])
def test_a_real_vocabulary(dtype, own, held):
    states, pairs = problem([100, 28, 60, 68], 128_256, dtype)
    pairs = sampled_by(states, pairs) if own else pairs
    expected, expected_gradients = run(states.to(torch.float64), pairs.to(torch.float64), "joint", "eager")
    output, gradients = run(states, pairs, memory_budget=budget_for(held, 128_256), own=own)
    assert output.loss.item() == pytest.approx(expected.loss.item(), rel=1e-3, abs=1e-4)
    for got, target in zip(gradients, expected_gradients, strict=True):
        assert relative_error(got, target) < 5e-3


@pytest.mark.gpu
def test_the_host_waits_nowhere_in_the_backward_pass_and_memory_is_bounded():
    lengths, vocabulary = [128] * 64, 128_256
    states, pairs = problem(lengths, vocabulary, torch.bfloat16)
    states = states.leaves()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = compute_loss(states, pairs).loss
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # The weight's gradient is summed in fp32.
    sums = 4 * states.weight.numel() + 2 * states.hidden.numel() + 2 * states.weight.numel()
    assert torch.cuda.max_memory_allocated() - before <= 10**9 + sums


@pytest.mark.gpu
def test_logits_beyond_2_to_the_31_within_one_buffer():
    lengths, vocabulary = [8400, 8500], 131_072
    states = random_hidden_states(sum(lengths), vocabulary, D, DEVICE, torch.bfloat16)
    # Another policy and a small vocabulary, for speed: the ratios are at their cap, the advantage is of the rewards.
    pairs = random_pairs(lengths, 64, DEVICE)
    whole, whole_gradients = run(states, pairs, "none", kl_coef=0.0, memory_budget=40 * 2**30)
    parts, gradients = run(states, pairs, "none", kl_coef=0.0, memory_budget=2 * 2**30)
    torch.testing.assert_close(whole.loss, parts.loss, rtol=1e-4, atol=1e-4)
    for got, target in zip(gradients, whole_gradients, strict=True):
        assert relative_error(got, target.double()) < 5e-3


@pytest.mark.parametrize("impl", ["eager", None, "triton"])
def test_constants_stay_so_and_inference_mode_gives_the_loss(impl):
    states, pairs = problem([3, 2, 4, 1], 30, torch.float32, 0)
    known, _ = pairs.known(P3OSettings())
    labels, cu_seqlens, *constants, settings = known
    constants = [tensor.clone().requires_grad_() for tensor in constants]
    leaves = states.leaves()
    loss = linear_p3o_loss(leaves.hidden, leaves.head, labels, cu_seqlens, *constants, settings, impl=impl).loss
    loss.backward()
    assert [tensor.grad for tensor in constants] == [None] * 3
    with torch.inference_mode():
        alone = linear_p3o_loss(states.hidden, states.head, *known, impl=impl).loss
    torch.testing.assert_close(alone, loss.detach())
