"""Rollouts that are sampled some rounds before they train, by a sampler of the process itself."""

import pytest

from fastp3o.training.loop import train
from tests.fastp3o.runs import config, metrics


def test_a_round_is_sampled_from_the_policy_of_so_many_updates_before(workplace, tiny_model):
    train(config(tiny_model, "fresh", updates=5))
    train(config(tiny_model, "stale", updates=5, rounds_ahead=2))
    fresh, stale = metrics("fresh"), metrics("stale")
    assert [step["staleness"] for step in stale] == [0, 1, 2, 2, 2]
    # The first round is the same one, and the next two are sampled by the same policy with their own seeds.
    names = ("reward", "response_length", "loss")
    assert [stale[0][name] for name in names] == [fresh[0][name] for name in names]
    assert stale[1]["response_length"] != fresh[1]["response_length"] or stale[1]["kl"] != fresh[1]["kl"]
    assert stale[0]["sampler_gap"] < 1e-4
    assert all(step["sampler_gap"] > 1e-3 for step in stale[1:])
    assert {"sampler_kl"} == {name for name in stale[1] if name.startswith("sampler_k")}


def test_ratios_to_what_sampled_are_exact(workplace, tiny_model):
    """At the first step the ratio of a stale response is the policy's probability over the sampler's, not 1."""
    step = {"updates": 2, "rounds_ahead": 1, "prompts_per_minibatch": 8, "inner_epochs": 1}
    train(config(tiny_model, "own", **step))
    train(config(tiny_model, "exact", **step, old_logprobs="sampler"))
    own, exact = metrics("own"), metrics("exact")
    assert [step["ratio_max"] for step in own] == [1, 1]
    assert exact[0]["ratio_max"] == pytest.approx(1, abs=1e-4)
    assert exact[1]["ratio_max"] > 1.001
    # Both compare what sampled with the policy before the update.
    assert exact[1]["sampler_gap"] > 1e-3
    assert exact[1]["ratio/noise"] < 1e-4


def test_weights_of_stale_responses_are_capped(workplace, tiny_model):
    train(config(tiny_model, "run", updates=4, rounds_ahead=2, sampler_ratio_cap=1.0, learning_rate=3e-2))
    steps = metrics("run")
    assert steps[0]["sampler_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert all(step["sampler_ratio_mean"] < 0.9 for step in steps[1:])
    assert any(0 < step["sampler_ratio_capped"] < 1 for step in steps[1:])
