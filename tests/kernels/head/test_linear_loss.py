from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from fastp3o_kernels import Groups, linear_loss
from tests.kernels.levels import IMPLEMENTATIONS, Batch
from tests.kernels.problems import (
    CHUNKED,
    DEVICE,
    EXAMPLES,
    GPU_ARITHMETIC,
    as_on_a_gpu,
    budget_for,
    random_hidden_states,
    rounded_gradients_of_logits,
    vocabularies,
)


def dpo(groups: Groups):
    log_ratios = groups.logprobs - groups["reference"]
    return -logsigmoid(0.3 * (log_ratios[:, 0] - log_ratios[:, 1])).sum(), {"kl": log_ratios.sum()}


def clipped_tokens(groups: Groups):
    """An objective for any K: PPO's ratios with an advantage of each response, and a weight of each group."""
    ratios = (groups.token_logprobs - groups["old"]).exp()
    advantages = groups.per_token(groups["advantages"] * groups["weights"][:, None])
    losses = torch.maximum(-advantages * ratios, -advantages * ratios.clamp(0.8, 1.2))
    return groups.means(losses).sum()


def constants(lengths: list[int], K: int, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    N, P = sum(lengths), len(lengths) // K

    def randn(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    return {
        "token_tensors": {"old": -3 + randn(N)},
        "response_tensors": {"reference": -5 + randn(P, K), "advantages": randn(P, K)},
        "group_tensors": {"weights": randn(P)},
    }


def double(tensors):
    return {place: {name: tensor.double() for name, tensor in named.items()} for place, named in tensors.items()}


def run(states, labels, lengths, objective, K, tensors, impl, incoming=2.0, **given):
    leaves, offsets = states.leaves(), [0, *accumulate(lengths)]
    given |= {"responses_per_group": K, "impl": impl, **tensors}
    output = linear_loss(leaves.hidden, leaves.head, labels, offsets, objective, **given)
    (incoming * output.loss).backward()
    return output, leaves.gradients()


# Its gradients are so small that halves are a fixed step apart.
NEAR_ZERO = {"groups": [[0, 5]], "V": 59, "held": 1, "divisor": None, "bias": True, "softcap": None, "seed": 0}


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    objective=st.sampled_from([dpo, clipped_tokens]),
    groups=st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), min_size=1, max_size=5),
    V=vocabularies(2, 60),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    impl=st.sampled_from(CHUNKED),
    held=st.integers(1, 40),
    divisor=st.sampled_from([None, 7.0]),
    bias=st.booleans(),
    softcap=st.sampled_from([None, 5.0]),
    gpu=st.sampled_from(GPU_ARITHMETIC),
    seed=st.integers(0, 10**6),
)
@example(objective=dpo, dtype=torch.float16, impl=None, gpu=GPU_ARITHMETIC[-1], **NEAR_ZERO)
def test_as_exact_as_eager_at_every_budget(objective, groups, V, dtype, impl, held, divisor, bias, softcap, gpu, seed):
    lengths = [length for group in groups for length in group]
    N = sum(lengths)
    states = random_hidden_states(N, V, 8, DEVICE, dtype, seed=seed, bias=bias, softcap=softcap)
    labels = torch.randint(V, (N,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    tensors = constants(lengths, 2, seed)
    given = labels, lengths, objective, 2
    exact, targets = run(states.to(torch.float64), *given, double(tensors), "eager", divisor=divisor)
    with rounded_gradients_of_logits(dtype) if gpu else nullcontext():
        eager, eager_gradients = run(states, *given, tensors, "eager", divisor=divisor)
    with as_on_a_gpu(dtype) if gpu else nullcontext():
        output, gradients = run(states, *given, tensors, impl, divisor=divisor, memory_budget=budget_for(held, V))
    scale = exact.loss.abs() + 1
    assert (output.loss - exact.loss).abs() <= 2 * (eager.loss - exact.loss).abs() + 1e-4 * scale
    assert output.metrics.keys() == exact.metrics.keys()
    for name, value in output.metrics.items():
        assert (value - exact.metrics[name]).abs() <= 1e-2 * (exact.metrics[name].abs() + 1)
        assert not value.requires_grad
    floor = 1e-4 * max(target.norm() for target in targets)
    for got, by_eager, target in zip(gradients, eager_gradients, targets, strict=True):
        assert got.dtype == dtype
        # Near 0 numbers of 16 bits are a fixed step apart.
        rounding = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2 * got.numel() ** 0.5
        assert (got - target).norm() <= 2 * (by_eager - target).norm() + 1e-5 * target.norm() + floor + rounding


@pytest.mark.parametrize("impl", CHUNKED)
@pytest.mark.parametrize("coefficients", ["small", "rising", "first none"])
def test_fp16_gradients_keep_their_digits_whatever_the_objective_divides_by(coefficients, impl):
    """Nearly even probabilities of 4,000 tokens."""
    lengths, V, D = [2, 3, 1, 4, 2, 2], 4000, 8
    states = random_hidden_states(sum(lengths), V, D, DEVICE, torch.float16, scale=0.01)
    labels = torch.randint(V, (sum(lengths),), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    weights = {"small": [1.0, 1.0, 1.0], "rising": [1e-4, 1e-2, 1.0], "first none": [0.0, 0.0, 1.0]}[coefficients]
    tensors = {"group_tensors": {"weights": torch.tensor(weights, device=DEVICE)}}

    def mean_of_many_long_responses(groups: Groups):
        return (groups["weights"] * groups.logprobs.sum(1)).sum() / (16 * 4096)

    given = labels, lengths, mean_of_many_long_responses, 2
    _, exact = run(states.to(torch.float64), *given, double(tensors), "eager")
    # The scale of a loss in fp16, without which the results themselves would be too small for it.
    with as_on_a_gpu(torch.float16):
        _, gradients = run(states, *given, tensors, impl, incoming=2.0**16, memory_budget=budget_for(5, V))
    for got, target in zip(gradients, exact, strict=True):
        assert (got.double() / 2.0**15 - target).norm() <= 2e-3 * target.norm()


@pytest.mark.parametrize("impl", [*CHUNKED, "eager"])
def test_a_divisor_of_another_dtype_leaves_the_losses(impl):
    states = random_hidden_states(4, 20, 8, DEVICE)
    labels, divisor = torch.zeros(4, dtype=torch.int64, device=DEVICE), torch.tensor(3.0, dtype=torch.float64)
    output = linear_loss(
        states.hidden, states.head, labels, [0, 4], lambda groups: groups.logprobs.sum(), divisor=divisor, impl=impl
    )
    assert output.loss.dtype == torch.float32


@pytest.mark.parametrize("K", [2, 3])
@pytest.mark.parametrize("impl", CHUNKED)
def test_p3o_as_an_objective_is_linear_p3o_loss(impl, K):
    batch = Batch("hidden", [3, 5, 1, 4, 2, 6], 30, K=K)
    pairs, p3o = batch.pairs, batch.settings

    def joint(groups: Groups):
        u, change = groups.logprobs - groups["ref"], groups.logprobs - groups["old"]
        q = (groups["rewards"] - p3o.kl_coef * u).detach()
        i, j = torch.triu_indices(K, K, offset=1)
        difference, moved = u[:, i] - u[:, j], change[:, i] - change[:, j]
        c = (change[:, i] + change[:, j]).exp().clamp(1 / p3o.ratio_cap, p3o.ratio_cap).detach()
        weight = -(q[:, i] - q[:, j]) * c
        clipped = difference - moved + moved.clamp(-p3o.clip_range, p3o.clip_range)
        return torch.maximum(weight * difference, weight * clipped).mean(1).sum() / 2

    expected, targets = batch.run(impl, incoming=2.0)
    tensors = {"old": pairs.old_logprobs, "ref": pairs.ref_logprobs, "rewards": pairs.rewards}
    given = pairs.labels, batch.lengths, joint, K, {"response_tensors": tensors}, impl
    output, gradients = run(batch.states, *given, memory_budget=budget_for(7, 30))
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(gradients, targets, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_accumulation_equals_the_whole_batch_by_the_divisor(impl):
    batch = Batch("objective")
    whole, expected = batch.run(impl)
    leaves = batch.leaves()
    parts = ((slice(0, 1), 4.0), (slice(1, 4), torch.tensor(4.0)))
    total = sum(batch.output(leaves, prompts, impl=impl, divisor=divisor).loss for prompts, divisor in parts)
    torch.testing.assert_close(total, whole.loss)
    torch.testing.assert_close(list(torch.autograd.grad(total, leaves)), expected)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 3, 0, 0], [0, 0, 2, 1]])
def test_nothing_to_learn_from_still_reaches_every_parameter(impl, lengths):
    batch = Batch("objective", lengths, bias=True)
    output, gradients = batch.run(impl)
    expected, targets = batch.to(torch.float64).run("eager")
    torch.testing.assert_close(output.loss.double(), expected.loss)
    for got, target in zip(gradients, targets, strict=True):
        torch.testing.assert_close(got.double(), target, rtol=1e-4, atol=1e-5)
        assert got.any() == (sum(lengths) > 0)


def test_a_constant_objective_has_no_gradient():
    states = random_hidden_states(6, 30, 8, DEVICE)
    labels = torch.arange(6, device=DEVICE)
    for objective in (lambda groups: groups["weights"].sum(), lambda groups: groups.logprobs.sum() * 0):
        tensors = {"group_tensors": {"weights": torch.ones(2, device=DEVICE)}}
        _, gradients = run(states, labels, [4, 2], objective, 1, tensors, None)
        assert not any(gradient.any() for gradient in gradients)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"objective": lambda groups: groups.logprobs}, r"0-d tensor, got shape \[2, 1\]"),
        ({"objective": lambda groups: 1.0}, "0-d tensor, got 1.0"),
        ({"token_tensors": {"old": torch.zeros(5, device=DEVICE)}}, r"old must begin with \[6\].*got \[5\]"),
        ({"response_tensors": {"r": torch.zeros(2, device=DEVICE)}}, r"r must begin with \[2, 1\].*got \[2\]"),
        ({"group_tensors": {"r": torch.zeros(3, device=DEVICE)}}, r"r must begin with \[2\].*got \[3\]"),
    ],
)
def test_bad_input(changed, message):
    states = random_hidden_states(6, 30, 8, DEVICE)
    given = {"cu_seqlens": [0, 4, 6], "objective": lambda groups: groups.logprobs.sum()} | changed
    with pytest.raises(ValueError, match=message):
        linear_loss(states.hidden, states.head, torch.arange(6, device=DEVICE), **given)
