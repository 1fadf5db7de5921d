"""P3O from log-probs of responses or tokens, from logits and from hidden states: what holds at
every level.
"""

import pytest
import torch

from fastp3o_kernels.operation import INTERPRET
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.levels import IMPLEMENTATIONS, P3O_LEVELS, Batch
from tests.kernels.problems import CLIPPINGS, DEVICE, budget_for
from tests.pairwise import pairwise

# Single tokens are clipped only where their log-probs are known.
EACH = [
    (clipping, level)
    for clipping in ("separate", "token")
    for level in P3O_LEVELS
    if level != "responses"
]
EACH += [("separate", "responses")]
BUDGET = 20_000
HEAD = {"bias": True, "softcap": 6.0, "temperature": 1.3}


@pytest.mark.parametrize(
    ("clipping", "level", "impl"),
    pairwise(list(CLIPPINGS), ["tokens", "logits", "hidden"], IMPLEMENTATIONS),
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
    output, _ = batch.sampled_by_itself(impl, **budget if level == "hidden" else {}).run(
        impl, **budget
    )
    assert output.metrics["ratio_mean"] == output.metrics["ratio_max"] == 1
    assert output.metrics["clip_fraction"] == 0


@pytest.mark.parametrize(
    ("clipping", "level", "impl", "held"),
    pairwise(list(CLIPPINGS), ["logits", "hidden"], IMPLEMENTATIONS, [1000, 5]),
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
    }.get(level, (pairs | {"exponentials_kernel": 1}, {"scale_kernel": 1}))


@pytest.mark.skipif(not INTERPRET, reason="bytes are counted in the interpreter")
def test_off_policy_logits_are_read_twice_and_written_once(monkeypatch):
    """By these formulas benchmarks divide."""
    batch = Batch("logits", [3, 2, 1, 2], 20_000, dtype=torch.bfloat16, clipping="none")
    leaves = batch.leaves()
    with counted_traffic(monkeypatch) as forward:
        loss = batch.output(leaves, impl="triton").loss
    once = pytest.approx(leaves[0].nbytes, rel=0.02)
    assert forward.loaded == once
    assert forward.stored < 0.02 * forward.loaded
    with counted_traffic(monkeypatch) as backward:
        loss.backward()
    assert (backward.loaded, backward.stored) == (once, once)
    assert (forward.memory + backward.memory) / 3 == once


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("clipping", "level"), EACH)
def test_parts_of_a_batch_add_up_to_it(clipping, level, impl):
    """One prompt, then three, then none: as with accumulation, or processes that share prompts
    unevenly.
    """
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
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 3, 2, 0]])
def test_nothing_to_learn_from_still_reaches_every_parameter(clipping, level, impl, lengths):
    batch = Batch(level, lengths, clipping=clipping, bias=True, apart=0.3)
    if level == "responses":
        batch.pairs.valid_responses = torch.zeros(
            len(lengths) // 2, 2, dtype=torch.bool, device=DEVICE
        )
    (loss, metrics, counts), gradients = batch.run(impl)
    assert not any((loss, *metrics.values(), *counts.values()))
    assert [gradient.shape for gradient in gradients] == [leaf.shape for leaf in batch.leaves()]
    assert not any(gradient.any() for gradient in gradients)
