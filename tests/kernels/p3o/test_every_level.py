"""P3O from log-probs of responses or tokens, from logits and from hidden states: what holds at every level."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.operation import INTERPRET
from tests.kernels.interpreted import counted_launches
from tests.kernels.levels import IMPLEMENTATIONS, P3O_LEVELS, Batch
from tests.kernels.problems import (
    CHUNKED,
    CLIPPINGS,
    DEVICE,
    EXAMPLES,
    GPU_ARITHMETIC,
    as_on_a_gpu,
    budget_for,
    oracle,
    ragged_groups,
    rounded_gradients_of_logits,
    vocabularies,
)
from tests.pairwise import pairwise

# Single tokens are clipped only where their log-probs are known.
EACH = [(clipping, level) for clipping in ("separate", "token") for level in P3O_LEVELS if level != "responses"]
EACH += [("separate", "responses")]
BUDGET = 20_000
HEAD = {"bias": True, "softcap": 6.0, "temperature": 1.3}


@pytest.mark.parametrize("level", ["logits", "hidden"])
@settings(max_examples=20, deadline=None)
@given(
    groups=ragged_groups(),
    V=st.integers(2, 40),
    clipping=st.sampled_from(CLIPPINGS),
    kl_reward=st.sampled_from(["current", "rollout"]),
    held=st.integers(1, 60),
    impl=st.sampled_from(["eager", None]),
    masked=st.booleans(),
    apart=st.sampled_from([None, 0.5, 30.0]),
    seed=st.integers(0, 10**6),
)
def test_it_is_the_paper_in_fp64(level, groups, V, clipping, kl_reward, held, impl, masked, apart, seed):
    K, lengths = groups
    given = {"K": K, "masked": masked, "apart": apart, "seed": seed, "clipping": clipping, "kl_reward": kl_reward}
    batch = Batch(level, lengths, V, **given, **HEAD).to(torch.float64)
    output, gradients = batch.run(impl, memory_budget=2 * budget_for(held, V))
    leaves = batch.leaves()
    logits = leaves[0] if level == "logits" else batch.policy(leaves).logits()
    expected = oracle(batch.pairs, logits, clipping, kl_reward)
    torch.testing.assert_close(output.loss, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gradients, list(torch.autograd.grad(expected, leaves)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("level", ["logits", "hidden"])
@settings(max_examples=EXAMPLES, deadline=None)
@given(
    groups=ragged_groups(),
    V=vocabularies(2, 90),
    clipping=st.sampled_from(CLIPPINGS),
    kl_reward=st.sampled_from(["current", "rollout"]),
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
def test_kernels_and_chunks_are_as_exact_as_eager(
    level, groups, V, clipping, kl_reward, dtype, impl, held, bias, softcap, masked, apart, gpu, seed
):
    K, lengths = groups
    given = {"K": K, "masked": masked, "apart": apart, "seed": seed, "clipping": clipping, "kl_reward": kl_reward}
    batch = Batch(level, lengths, V, dtype=dtype, bias=bias, softcap=softcap, **given)
    expected, targets = batch.to(torch.float64).run("eager")
    with rounded_gradients_of_logits(dtype) if gpu else nullcontext():
        eager, eager_gradients = batch.run("eager")
    with as_on_a_gpu(dtype) if gpu else nullcontext():
        output, gradients = batch.run("triton" if level == "logits" else impl, memory_budget=budget_for(held, V))
    size = 1e-5 * (1 + sum(lengths))
    assert abs(output.loss - expected.loss) <= 4 * abs(eager.loss - expected.loss) + size
    # The interpreter cuts off where hardware rounds to 16 bits.
    share = 1e-4 + (torch.finfo(dtype).eps if INTERPRET and level == "logits" else 0.0)
    for got, by_eager, target in zip(gradients, eager_gradients, targets, strict=True):
        assert got.dtype == dtype
        assert (got - target).norm() <= 2 * (by_eager - target).norm() + share * target.norm() + size
    torch.testing.assert_close(output.metrics, eager.metrics, rtol=1e-4, atol=1e-4)
    assert output.counts == eager.counts


@pytest.mark.parametrize(
    ("clipping", "level", "impl"), pairwise(list(CLIPPINGS), ["tokens", "logits", "hidden"], IMPLEMENTATIONS)
)
@pytest.mark.parametrize("K", [2, 4])
def test_a_shift_of_the_rewards_per_prompt_changes_no_bit(clipping, level, impl, K):
    batch = Batch(level, clipping=clipping, K=K)
    batch.pairs.rewards = (batch.pairs.rewards * 16).round() / 16
    plain, gradients = batch.run(impl, memory_budget=BUDGET)
    shifts = torch.tensor([[1024.0], [-7.5], [0.25], [3.0]], device=DEVICE)
    batch.pairs.rewards = batch.pairs.rewards + shifts[: 8 // K]
    shifted, shifted_gradients = batch.run(impl, memory_budget=BUDGET)
    assert torch.equal(plain.loss, shifted.loss)
    assert all(map(torch.equal, gradients, shifted_gradients))


@pytest.mark.parametrize(
    ("clipping", "level", "impl", "dtype", "held"),
    pairwise(
        ["joint", "separate", "none"],
        ["tokens", "logits", "hidden"],
        IMPLEMENTATIONS,
        [torch.float32, torch.bfloat16],
        [3000, 30, 2],
    ),
)
def test_the_ratio_of_two_evaluations_is_exactly_one(clipping, level, impl, dtype, held):
    """Sums and losses add in the same order, however long a response is, and at every budget."""
    budget = {"memory_budget": budget_for(held, 20)}
    lengths = [1, 3, 255, 256, 257, 1000] if level == "tokens" else [3, 40, 7, 2, 12, 20]
    batch = Batch(level, lengths, 20, clipping=clipping, dtype=dtype)
    output, _ = batch.sampled_by_itself(impl, **budget if level == "hidden" else {}).run(impl, **budget)
    assert output.metrics["ratio_mean"] == output.metrics["ratio_max"] == 1
    assert output.metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("clipping", "level", "impl", "held"), pairwise(list(CLIPPINGS), ["logits", "hidden"], IMPLEMENTATIONS, [1000, 5])
)
def test_old_log_probs_of_its_own_are_those_that_it_computes(clipping, level, impl, held):
    given = {"clipping": clipping, "apart": 0.3, **HEAD}
    expected, targets = Batch(level, **given).sampled_by_itself().run("eager", incoming=-1.5)
    itself = Batch(f"{level}, its own", **given)
    itself.pairs = Batch(level, **given).sampled_by_itself().pairs
    output, gradients = itself.run(impl, incoming=-1.5, memory_budget=budget_for(held, 50))
    torch.testing.assert_close(output.loss, expected.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradients, targets, rtol=1e-4, atol=2e-5)
    assert output.metrics["ratio_mean"] == output.metrics["ratio_max"] == 1
    assert output.metrics["clip_fraction"] == 0
    torch.testing.assert_close(output.metrics, expected.metrics, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRET, reason="launches are counted in the interpreter")
@pytest.mark.parametrize("level", ["tokens", "logits", "hidden", "hidden, its own"])
def test_launches(monkeypatch, level):
    batch = Batch(level)
    leaves = batch.leaves()
    with counted_launches(monkeypatch) as forward:
        loss = batch.output(leaves, impl="triton").loss
    with counted_launches(monkeypatch) as backward:
        loss.backward()
    pairs, rows = dict.fromkeys(("pair_kernel", "results_kernel"), 1), {"logprobs_kernel": 1}
    assert (forward, backward) == {
        "tokens": (pairs, {}),
        "logits": (rows | pairs, {"dlogits_kernel": 1}),
    }.get(level, (rows | pairs | {"dlogits_kernel": 1}, {"scale_kernel": 1}))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
def test_parts_of_a_batch_add_up_to_it(clipping, level, impl):
    """One prompt, then three, then none: as with accumulation, or processes that share prompts unevenly."""
    batch = Batch(level, [3, 4, 0, 2, 1, 5, 6, 2], clipping=clipping, bias=True)
    leaves = batch.leaves()
    whole, metrics, counts = batch.output(leaves, impl=impl, memory_budget=BUDGET)
    divisors = (batch.divisor, float(batch.divisor), torch.tensor(batch.divisor))
    slices = (slice(0, 1), slice(1, 4), slice(4, 4))
    outputs = [
        batch.output(leaves, part, impl=impl, divisor=divisor, memory_budget=BUDGET)
        for part, divisor in zip(slices, divisors, strict=True)
    ]
    total = sum(output.loss for output in outputs)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)
    found, expected = torch.autograd.grad(total, leaves), torch.autograd.grad(whole, leaves)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert metrics.keys() - counts.keys() == {"ratio_max"}
    for name, count in counts.items():
        assert sum(output.counts[name] for output in outputs) == count
        total = sum(output.metrics[name] * output.counts[name] for output in outputs)
        torch.testing.assert_close(total / count, metrics[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
def test_a_prompt_without_a_pair_is_left_out(clipping, level, impl):
    """Its tokens count as tokens, and it as a prompt; nothing is asked of it."""
    batch = Batch(level, [1, 5, 6, 2], clipping=clipping, bias=True)
    leaves = batch.leaves()
    alone = batch.output(leaves, slice(1, 2), impl=impl, divisor=batch.divisor, memory_budget=BUDGET)
    batch.pairs.valid_responses = torch.tensor([[True, False], [True, True]], device=DEVICE)
    batch.pairs.old_logprobs[0], batch.pairs.rewards[0] = float("nan"), float("nan")
    both = batch.output(leaves, impl=impl, memory_budget=BUDGET)
    gradients = [torch.autograd.grad(output.loss, leaves) for output in (both, alone)]
    torch.testing.assert_close(both[:2], alone[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), [pair for pair in EACH if pair[1] != "responses"])
def test_an_empty_response_is_one_that_is_not_valid(clipping, level, impl):
    """Empty responses stand at every place, of three to a prompt; the last prompt keeps no pair."""
    lengths = [0, 3, 2, 4, 0, 1, 2, 3, 0, 0, 0, 2]
    batch = Batch(level, lengths, clipping=clipping, K=3, bias=True)
    full = Batch(level, [max(length, 1) for length in lengths], clipping=clipping, K=3, bias=True)
    full.pairs.valid_responses = torch.tensor(lengths, device=DEVICE).view(-1, 3) > 0
    for name in ("old_logprobs", "ref_logprobs", "rewards"):
        getattr(full.pairs, name)[full.pairs.valid_responses] = getattr(batch.pairs, name)[full.pairs.valid_responses]
    has_source = torch.cat([torch.full((max(n, 1),), n > 0) for n in lengths])
    full.pairs.labels[has_source] = batch.pairs.labels
    full.pairs.old_token_logprobs[has_source] = batch.pairs.old_token_logprobs
    leaves, full_leaves = batch.leaves(), full.leaves()
    with torch.no_grad():
        full_leaves[0][has_source] = leaves[0]
        for target, source in zip(full_leaves[1:], leaves[1:], strict=True):
            target.copy_(source)
    empty = batch.output(leaves, impl=impl, memory_budget=BUDGET)
    output = full.output(full_leaves, impl=impl, divisor=batch.divisor, memory_budget=BUDGET)
    torch.testing.assert_close(output[:2], empty[:2], rtol=1e-4, atol=1e-6)
    got, *others = torch.autograd.grad(output.loss, full_leaves)
    expected, *expected_others = torch.autograd.grad(empty.loss, leaves)
    torch.testing.assert_close(got[has_source], expected, rtol=1e-4, atol=1e-6)
    assert not got[~has_source].any()
    torch.testing.assert_close(others, expected_others, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 3, 2, 0]])
def test_nothing_to_learn_from_still_reaches_every_parameter(clipping, level, impl, lengths):
    batch = Batch(level, lengths, clipping=clipping, bias=True, apart=0.3)
    if level == "responses":
        batch.pairs.valid_responses = torch.zeros(len(lengths) // 2, 2, dtype=torch.bool, device=DEVICE)
    (loss, metrics, counts), gradients = batch.run(impl)
    assert not any((loss, *metrics.values(), *counts.values()))
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in batch.leaves()]
    assert not any(gradient.any() for gradient in gradients)
