from contextlib import nullcontext

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.peak_memory import PeakMemory
from fastp3o_kernels import Groups, P3OSettings, checks, linear_logprobs, linear_loss, linear_p3o_loss
from tests.kernels.problems import (
    CHUNKED,
    DEVICE,
    EXAMPLES,
    GPU_ARITHMETIC,
    as_on_a_gpu,
    budget_for,
    random_hidden_states,
    random_pairs,
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


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def run(states, labels, lengths, objective, K, tensors, impl, **given):
    states = states.leaves()
    output = linear_loss(
        states.hidden,
        states.head,
        labels,
        offsets(lengths),
        objective,
        responses_per_group=K,
        **tensors,
        impl=impl,
        **given,
    )
    (2 * output.loss).backward()
    return output, states.gradients()


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
@example(
    objective=dpo,
    groups=[[0, 5]],
    V=59,
    dtype=torch.float16,
    impl=None,
    held=1,
    divisor=None,
    bias=True,
    softcap=None,
    gpu=GPU_ARITHMETIC[-1],
    seed=0,
)
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
    states = states.leaves()
    with as_on_a_gpu(torch.float16):
        output = linear_loss(
            states.hidden,
            states.head,
            labels,
            offsets(lengths),
            mean_of_many_long_responses,
            responses_per_group=2,
            **tensors,
            impl=impl,
            memory_budget=budget_for(5, V),
        )
    # The scale of a loss in fp16, without which the results themselves would be too small for it.
    (2.0**16 * output.loss).backward()
    for got, target in zip(states.gradients(), exact, strict=True):
        assert (got.double() / 2.0**15 - target).norm() <= 2e-3 * target.norm()


def test_groups_that_do_not_cover_the_tokens_are_refused_on_a_gpu_too(monkeypatch):
    monkeypatch.setattr(checks, "may_look_at_values", lambda tensor: False)
    states, labels = random_hidden_states(4, 20, 8, DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] = 3 must be the number of tokens, 4"):
        linear_loss(states.hidden, states.head, labels, torch.tensor([0, 1, 3]), lambda groups: groups.logprobs.sum())
    nothing = torch.zeros(1, 2, device=DEVICE)
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] = 3 must be the number of tokens, 4"):
        linear_p3o_loss(states.hidden, states.head, labels, torch.tensor([0, 1, 3]), nothing, nothing, nothing)


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
    lengths = [3, 5, 1, 4, 2, 6]
    states = random_hidden_states(sum(lengths), 30, 8, DEVICE)
    pairs = random_pairs(lengths, 30, DEVICE, K=K)
    known, _ = pairs.known(P3OSettings())
    labels, _, old, ref, rewards, p3o = known

    def joint(groups: Groups):
        u = groups.logprobs - groups["ref"]
        change = groups.logprobs - groups["old"]
        q = (groups["rewards"] - p3o.kl_coef * u).detach()
        i, j = torch.triu_indices(K, K, offset=1)
        difference, moved = u[:, i] - u[:, j], change[:, i] - change[:, j]
        c = (change[:, i] + change[:, j]).exp().clamp(1 / p3o.ratio_cap, p3o.ratio_cap).detach()
        weight = -(q[:, i] - q[:, j]) * c
        clipped = difference - moved + moved.clamp(-p3o.clip_range, p3o.clip_range)
        return torch.maximum(weight * difference, weight * clipped).mean(1).sum() / 2

    leaves = states.leaves()
    expected = linear_p3o_loss(leaves.hidden, leaves.head, *known, impl=impl).loss
    (2 * expected).backward()
    tensors = {"response_tensors": {"old": old, "ref": ref, "rewards": rewards}}
    output, gradients = run(states, labels, lengths, joint, K, tensors, impl, memory_budget=budget_for(7, 30))
    torch.testing.assert_close(output.loss, expected)
    for got, target in zip(gradients, leaves.gradients(), strict=True):
        torch.testing.assert_close(got, target, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("impl", [None, "triton", "eager"])
def test_accumulation_equals_the_whole_batch_by_the_divisor(impl):
    lengths = [4, 1, 6, 2]
    states = random_hidden_states(13, 30, 8, DEVICE)
    labels, tensors = torch.arange(13, device=DEVICE), constants(lengths, 2, 0)
    whole, expected = run(states, labels, lengths, dpo, 2, tensors, impl)
    leaves, total = states.leaves(), 0.0
    for group, tokens in ((0, slice(0, 5)), (1, slice(5, 13))):
        part = {"reference": tensors["response_tensors"]["reference"][group : group + 1]}
        loss = linear_loss(
            leaves.hidden[tokens],
            leaves.head,
            labels[tokens],
            offsets(lengths[2 * group : 2 * group + 2]),
            dpo,
            responses_per_group=2,
            response_tensors=part,
            divisor=torch.tensor(2.0, device=DEVICE),
            impl=impl,
        ).loss
        (2 * loss).backward()
        total += loss.detach()
    torch.testing.assert_close(total, whole.loss.detach())
    for got, target in zip(leaves.gradients(), expected, strict=True):
        torch.testing.assert_close(got, target)


@pytest.mark.parametrize("impl", [None, "triton", "eager"])
@pytest.mark.parametrize("lengths", [[], [0, 0], [0, 3, 0, 0], [0, 0, 2, 1]])
def test_nothing_to_learn_from_still_reaches_every_parameter(impl, lengths):
    states = random_hidden_states(sum(lengths), 30, 8, DEVICE, bias=True)
    labels = torch.zeros(sum(lengths), dtype=torch.long, device=DEVICE)
    tensors = {"response_tensors": {"reference": torch.zeros(len(lengths) // 2, 2, device=DEVICE)}}
    output, gradients = run(states, labels, lengths, dpo, 2, tensors, impl)
    assert [gradient.shape for gradient in gradients] == [states.hidden.shape, (30, 8), (30,)]
    if sum(lengths) == 0:
        assert not any(gradient.any() for gradient in gradients)
    expected, _ = run(states.to(torch.float64), labels, lengths, dpo, 2, double(tensors), "eager")
    torch.testing.assert_close(output.loss.double(), expected.loss.double())


@pytest.mark.parametrize(("hidden", "weight", "products"), [(1, 1, 6), (1, 0, 4), (0, 1, 4), (0, 0, 2)])
def test_only_the_products_that_are_needed(hidden, weight, products):
    lengths, V, D = [9, 7, 8, 8], 48, 16
    states = random_hidden_states(32, V, D, DEVICE).leaves(bool(hidden), bool(weight))
    tensors = constants(lengths, 2, 0)
    labels = torch.arange(32, device=DEVICE)
    with FlopCounterMode(display=False) as counter:
        loss, _ = linear_loss(
            states.hidden, states.head, labels, offsets(lengths), dpo, responses_per_group=2, **tensors
        )
        if loss.requires_grad:
            loss.backward()
    assert counter.get_total_flops() == products * 32 * V * D


def test_logits_never_exist_at_once():
    lengths, V = [64] * 8, 2000
    states = random_hidden_states(512, V, 8, DEVICE).leaves()
    labels = torch.arange(512, device=DEVICE)
    with PeakMemory() as memory:
        output = linear_loss(
            states.hidden,
            states.head,
            labels,
            offsets(lengths),
            lambda groups: groups.logprobs.sigmoid().sum(),
            responses_per_group=2,
            memory_budget=budget_for(150, V),
        )
        output.loss.backward()
    assert memory.peak < 0.8 * 512 * V * 4


def test_the_callers_tensors_are_constants_and_no_grad_and_inference_mode_work():
    lengths = [4, 2]
    states = random_hidden_states(6, 30, 8, DEVICE)
    labels = torch.arange(6, device=DEVICE)
    reference = torch.zeros(1, 2, device=DEVICE, requires_grad=True)
    tensors = {"response_tensors": {"reference": reference}}
    for impl in (None, "eager"):
        output, _ = run(states, labels, lengths, dpo, 2, tensors, impl)
        assert reference.grad is None
        for without in (torch.no_grad, torch.inference_mode):
            with without():
                loss, _ = linear_loss(
                    states.hidden,
                    states.head,
                    labels,
                    offsets(lengths),
                    dpo,
                    responses_per_group=2,
                    impl=impl,
                    **tensors,
                )
            assert not loss.requires_grad
            torch.testing.assert_close(loss, output.loss.detach())


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
        ({"cu_seqlens": [0.5, 4, 6]}, "cu_seqlens must be int32 or int64"),
        ({"cu_seqlens": torch.tensor([0, 4, 3, 6])}, "of negative length"),
        ({"responses_per_group": 4}, "must be a multiple"),
    ],
)
def test_bad_input(changed, message):
    states = random_hidden_states(6, 30, 8, DEVICE)
    given = {"cu_seqlens": offsets([4, 2]), "objective": lambda groups: groups.logprobs.sum()} | changed
    with pytest.raises(ValueError, match=message):
        linear_loss(states.hidden, states.head, torch.arange(6, device=DEVICE), **given)


def test_the_second_backward_pass_is_refused():
    output, _ = run(
        random_hidden_states(6, 30, 8, DEVICE),
        torch.arange(6, device=DEVICE),
        [6],
        lambda g: g.logprobs.sum(),
        1,
        {},
        None,
    )
    with pytest.raises(RuntimeError, match="call the loss again"):
        output.loss.backward()


def test_a_mean_over_tokens_is_a_divisor():
    states, labels = random_hidden_states(6, 30, 8, DEVICE), torch.arange(6, device=DEVICE)
    loss, _ = linear_loss(
        states.hidden, states.head, labels, offsets([4, 2]), lambda groups: -groups.token_logprobs.sum(), divisor=6
    )
    torch.testing.assert_close(loss, -linear_logprobs(states.hidden, states.head, labels).mean())
