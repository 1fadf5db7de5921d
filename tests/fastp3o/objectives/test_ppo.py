from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.objectives.ppo import estimate_advantages, ppo_loss, token_rewards, whiten
from fastp3o.training.loop import train
from tests.fastp3o.backward import means
from tests.fastp3o.runs import assert_equal, assert_resumes, config, metrics, weights


def run(model: str, folder: str, **changes) -> None:
    train(config(model, folder, PPOConfig, **changes))


def given(
    old_logprobs: Tensor, old_values: Tensor, advantages: Tensor, returns: Tensor
) -> Microbatch:
    unused = torch.empty(0)
    prepared = {"old_values": old_values, "advantages": advantages, "returns": returns}
    return Microbatch(None, unused, old_logprobs, unused, prepared=prepared)


def settings(**changes) -> PPOConfig:
    return PPOConfig(model="", output_dir="", prompts="", reward="", **changes)


@pytest.mark.parametrize("capped", [False, True])
def test_the_first_step_is_the_policy_gradient(capped):
    """Importance weights are of the policy's loss alone."""
    logprobs, values = torch.randn(2, 4, dtype=torch.float64).unbind()
    logprobs, values = logprobs.requires_grad_(), values.requires_grad_()
    advantages, returns = torch.randn(2, 4, dtype=torch.float64)
    ratios = torch.tensor([0.5, 1.0, 1.9, 1e300], dtype=torch.float64)
    microbatch = given(logprobs.detach(), values.detach(), advantages, returns)
    microbatch = replace(microbatch, sampler_token_logprobs=logprobs.detach() - ratios.log())
    chosen = settings(value_coef=0.5, sampler_ratio_cap=2.0 if capped else 0.0)
    loss, metrics = ppo_loss(logprobs, values, microbatch, 4, chosen)
    policy_gradient, value_gradient = torch.autograd.grad(loss, (logprobs, values))
    torch.testing.assert_close(
        policy_gradient, -advantages * (ratios.clamp(max=2) if capped else 1) / 4
    )
    torch.testing.assert_close(value_gradient, 0.5 * (values.detach() - returns) / 4)
    metrics = means(metrics)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1
    assert metrics["clip_fraction"] == metrics["value_clip_fraction"] == 0
    if capped:
        assert metrics["sampler_ratio_mean"].item() == pytest.approx((0.5 + 1 + 1.9 + 2) / 4)
        assert metrics["sampler_ratio_capped"] == 0.25


@pytest.mark.parametrize("bound", ["clip", "penalty", "both"])
def test_a_penalty_takes_the_place_of_clipping_or_joins_it(bound):
    """Written a second time, token by token."""
    torch.manual_seed(0)
    old, advantages = torch.randn(2, 8, dtype=torch.float64)
    logprobs = (old + 0.4 * torch.randn(8, dtype=torch.float64)).requires_grad_()
    zero = torch.zeros(8, dtype=torch.float64)
    chosen = settings(step_bound=bound, **({} if bound == "clip" else {"step_kl_coef": 0.6}))
    loss, metrics = ppo_loss(logprobs, zero, given(old, zero, advantages, zero), 8, chosen)
    expected, outside = 0.0, 0
    for now, before, a in zip(logprobs, old, advantages, strict=True):
        ratio = torch.exp(now) / torch.exp(before)
        outside += not 0.8 <= ratio <= 1.2
        gain = a * ratio
        if bound != "penalty":
            gain = torch.minimum(gain, a * ratio.clamp(0.8, 1.2))
        if bound != "clip":
            gain = gain - 0.6 * (ratio - 1 - torch.log(ratio))
        expected = expected - gain / 8
    torch.testing.assert_close(loss, expected)
    theirs = torch.autograd.grad(expected, logprobs)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], theirs)
    assert means(metrics)["clip_fraction"] == outside / 8


@pytest.mark.parametrize("bound", ["clip", "penalty", "both"])
def test_a_ratio_that_overflows_stops_nothing_where_its_token_has_no_loss(bound):
    """Clipped, without an advantage, or of a response that takes no part."""
    old, zero = torch.tensor([-300.0, -300.0, -300.0, -2.0]), torch.zeros(4)
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -2.0], requires_grad=True)
    row = SimpleNamespace(cu_seqlens=torch.tensor([0, 2, 3, 4]))
    microbatch = replace(
        given(old, zero, torch.tensor([1.0, 0.0, -1.0, 1.0]), zero),
        row=row,
        loss_mask=torch.tensor([[True], [False], [True]]),
    )
    chosen = settings(step_bound=bound, **({} if bound == "clip" else {"step_kl_coef": 0.1}))
    loss, metrics = ppo_loss(logprobs, zero, microbatch, 3, chosen)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.isfinite()
    assert all(metric.isfinite().all() for metric in metrics.values())
    assert gradient[2] == 0
    assert gradient[3] == pytest.approx(-1 / 3)
    assert (gradient[:2] == 0).all() if bound == "clip" else gradient.isfinite().all()


@pytest.mark.parametrize(("value", "moves"), [(0.1, True), (0.3, False), (-0.3, True)])
def test_a_value_that_has_moved_far_towards_its_return_stays(value, moves):
    """Its clipped distance to the return, 1, is the longer one then."""
    values = torch.tensor([value], requires_grad=True)
    zero = torch.zeros(1)
    batch, clipped = given(zero, zero, zero, torch.ones(1)), settings(value_clip_range=0.2)
    loss, _ = ppo_loss(zero.clone().requires_grad_(), values, batch, 1, clipped)
    loss.backward()
    assert bool(values.grad.ne(0)) == moves


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    st.integers(0, 99),
)
def test_ragged_responses_have_the_advantages_of_each_alone(lengths, gae_lambda, seed):
    """By the sum of equation 16 written out."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, sum(lengths), generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    result = estimate_advantages(rewards, values, cu_seqlens, max(lengths), gae_lambda=gae_lambda)
    for T, r, v, found in zip(
        lengths, *(every.split(lengths) for every in (rewards, values, result)), strict=True
    ):
        deltas = [r[t] + (v[t + 1] if t + 1 < T else 0) - v[t] for t in range(T)]
        expected = [sum(gae_lambda ** (u - t) * deltas[u] for u in range(t, T)) for t in range(T)]
        torch.testing.assert_close(found, torch.stack(expected))


def test_each_token_pays_for_its_kl_and_the_last_one_earns_the_reward():
    logprobs, ref_logprobs = torch.randn(2, 6, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, 2, 3, 6], dtype=torch.int32)
    rewards = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    result = token_rewards(rewards, logprobs, ref_logprobs, cu_seqlens, kl_coef=0.5)
    penalties = -0.5 * (logprobs - ref_logprobs)
    torch.testing.assert_close(
        result, penalties + torch.tensor([0, 1, 2, 0, 0, 3.0], dtype=torch.float64)
    )


def test_whitening_keeps_the_pieces_and_takes_mean_and_deviation_of_all():
    pieces = [torch.randn(5) * 3 + 7, torch.randn(1) - 20, torch.randn(8)]
    whitened = whiten(pieces, lambda sums: sums)
    assert [len(piece) for piece in whitened] == [5, 1, 8]
    together = torch.cat(whitened)
    assert together.mean().item() == pytest.approx(0, abs=1e-6)
    assert together.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    assert torch.equal(
        torch.cat(whiten([torch.full((4,), 2.5)], lambda sums: sums)), torch.zeros(4)
    )


def test_a_run_with_a_penalty_is_resumed_with_the_critic(workplace, tiny_model):
    penalized = {"step_bound": "penalty", "save_every": 2, "reward": "rewards_for_tests:varied"}
    run(tiny_model, "whole", **penalized)
    assert_resumes(config(tiny_model, "whole", PPOConfig, **penalized))
    # The policy alone is saved.
    _, loading = AutoModelForCausalLM.from_pretrained("whole/model", output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert not loading["missing_keys"]


def test_values_are_learned_beside_the_policy_and_not_by_it(workplace, tiny_model):
    """Within the first update advantages are the same, whatever the critic learns meanwhile."""
    run(tiny_model, "without", updates=1, value_coef=0.0)
    run(tiny_model, "with", updates=1, value_coef=100.0, critic_learning_rate=1e-2)
    assert_equal(weights("without"), weights("with"))
    learned = {
        "value_coef": 1.0,
        "critic_learning_rate": 1e-2,
        "reward": "rewards_for_tests:constant",
    }
    for lora_rank in (0, 4):
        run(tiny_model, f"longer-{lora_rank}", updates=8, lora_rank=lora_rank, **learned)
        losses = [step["value_loss"] for step in metrics(f"longer-{lora_rank}")]
        assert losses[-1] < 0.1 * losses[0]
