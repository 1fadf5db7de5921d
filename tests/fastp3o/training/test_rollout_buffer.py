"""Rollouts that are sampled some rounds before they train, by a sampler of the process itself."""

import json
from pathlib import Path

import pytest

from fastp3o.run.signals import StoppedError
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, metrics, weights


def test_no_round_ahead_is_the_run_without(workplace, tiny_model):
    train(config(tiny_model, "plain", updates=2))
    train(config(tiny_model, "zero", updates=2, rounds_ahead=0))
    assert metrics("plain") == metrics("zero")
    assert "staleness" not in metrics("zero")[0]


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


@pytest.mark.parametrize("old_logprobs", ["policy", "sampler"])
def test_a_resumed_run_trains_on_the_rounds_that_were_sampled(workplace, tiny_model, old_logprobs):
    stale = {"rounds_ahead": 2, "old_logprobs": old_logprobs, "updates": 5, "save_every": 1}
    train(config(tiny_model, "whole", **stale))
    interrupted = {**stale, "reward": "rewards_for_tests:fails_on_fifth_call"}
    with pytest.raises(StoppedError):
        train(config(tiny_model, "resumed", **interrupted))
    pending = json.loads(Path("resumed/state/step-000004/pending.json").read_text())
    assert {number: content["sampled_at"] for number, content in pending.items()} == {"5": 3}
    pending = json.loads(Path("resumed/state/step-000003/pending.json").read_text())
    assert {number: content["sampled_at"] for number, content in pending.items()} == {"4": 2, "5": 3}
    train(config(tiny_model, "resumed", **interrupted, resume=True))
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))


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


@pytest.mark.parametrize("clipping", ["joint", "token"])
def test_weights_of_a_sampler_that_rounds_alike_change_nothing(workplace, tiny_model, clipping):
    plain = {"updates": 2, "clipping": clipping}
    train(config(tiny_model, "plain", **plain))
    train(config(tiny_model, "weighted", **plain, sampler_ratio_cap=2.0))
    for one, two in zip(metrics("plain"), metrics("weighted"), strict=True):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["sampler_ratio_mean"] == pytest.approx(1, abs=1e-4)
        assert two["sampler_ratio_capped"] == 0
    for name, weight in weights("plain").items():
        assert (weight - weights("weighted")[name]).abs().max() < 1e-4


def test_weights_of_stale_responses_are_capped(workplace, tiny_model):
    train(config(tiny_model, "run", updates=4, rounds_ahead=2, sampler_ratio_cap=1.0, learning_rate=3e-2))
    steps = metrics("run")
    assert steps[0]["sampler_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert all(step["sampler_ratio_mean"] < 0.9 for step in steps[1:])
    assert any(0 < step["sampler_ratio_capped"] < 1 for step in steps[1:])
