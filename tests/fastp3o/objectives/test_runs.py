"""Short runs of every objective by its name: it learns, resumes exactly, and its settings do what they say."""

from pathlib import Path
from random import Random
from statistics import fmean

import pytest
import torch

from fastp3o.cli import parse_chosen
from fastp3o.commands.online import OBJECTIVES
from fastp3o.objectives import p3o
from fastp3o.objectives.base import Microbatch, mean_kl
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.policy_gradient import DAPOConfig, GRPOConfig, GRPOPlusConfig, RLOOConfig
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights, weights_of_start

ROOT = Path(__file__).parents[3]

NEW = sorted(OBJECTIVES.keys() - {"p3o", "ppo"})  # those have runs of their own
# None of the tiny model's responses comes to its end.
SETTINGS = {
    "ppg": {"prompts_per_minibatch": 0, "inner_epochs": 1},
    "grpo_plus": {"mask_truncated": False},
}


# One of each kind of state, and of loss; all at night.
KINDS = {"bpo", "grpo", "nash_md", "online_simpo", "ppg", "rebel", "reinforce"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.nightly) for n in NEW])
def test_a_resumed_run_is_the_uninterrupted_one_and_moves_the_policy(workplace, tiny_model, name):
    settings = {"updates": 2, "reward": "rewards_for_tests:varied", **SETTINGS.get(name, {})}
    train(config(tiny_model, "whole", OBJECTIVES[name], **settings, save_every=1))
    copy_at_save_before("whole", "resumed")
    train(config(tiny_model, "resumed", OBJECTIVES[name], **settings, resume=True, save_every=1))
    assert metrics("whole") == metrics("resumed")
    end = weights("whole")
    assert_equal(end, weights("resumed"))
    assert not any(torch.equal(end[n], w) for n, w in weights_of_start(tiny_model).items())


@pytest.mark.parametrize(
    "name", ["grpo", "rebel", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("rloo", "gspo"))]
)
def test_a_run_raises_the_reward(workplace, tiny_model, name):
    settings = {"gspo": {"clip_low": 0.2, "clip_high": 0.2}}.get(name, {})
    train(config(tiny_model, "run", OBJECTIVES[name], updates=15, responses_per_prompt=4, **settings))
    steps = metrics("run")
    assert sum(s["reward"] for s in steps[-4:]) > sum(s["reward"] for s in steps[:4])


def test_the_first_ratio_is_exactly_one(workplace, tiny_model):
    settings = {"updates": 1, "inner_epochs": 1, "prompts_per_minibatch": 8}
    train(config(tiny_model, "run", GRPOConfig, **settings))
    (step,) = metrics("run")
    assert step["ratio_mean"] == 1
    assert step["clip_fraction"] == step["k3"] == 0


@pytest.mark.parametrize("config_class", [GRPOConfig, DAPOConfig, PPOConfig])
def test_microbatches_do_not_matter(workplace, tiny_model, config_class):
    settings = {"prompts_per_minibatch": 8, "updates": 2, "entropy_coef": 0.01}
    train(config(tiny_model, "one", config_class, **settings))
    train(config(tiny_model, "eight", config_class, tokens_per_row=1, **settings))
    for one, eight in zip(metrics("one"), metrics("eight"), strict=True):
        names = one.keys() - {"packing_efficiency", "ratio_max"}
        assert {n: one[n] for n in names} == pytest.approx({n: eight[n] for n in names}, rel=2e-3, abs=2e-4)
    first, second = weights("one"), weights("eight")
    assert all(torch.allclose(first[name], second[name], atol=2e-4) for name in first)


def test_an_objective_is_chosen_by_name_and_told_in_the_configuration(workplace, tiny_model):
    flags = ["--model=m", "--output_dir=o", "--prompts=p", "--reward=r", "--objective=dapo"]
    chosen = parse_chosen(OBJECTIVES, flags)
    assert isinstance(chosen, DAPOConfig)
    assert chosen.objective == "dapo"
    assert {name: config_class.objective for name, config_class in OBJECTIVES.items()} == {n: n for n in OBJECTIVES}


# --- settings -------------------------------------------------------------------------------------------------------


def test_the_kl_of_an_update_is_the_mean_over_responses_of_all_microbatches():
    zeros = torch.zeros(2, 2)
    rows = [Microbatch(None, zeros, zeros, zeros, zeros + kl, zeros) for kl in (1.0, 2.0, 6.0)]
    assert mean_kl([rows[:1], rows[1:]], lambda sums: sums) == 3.0
    assert mean_kl([rows[:1]], lambda sums: sums + torch.tensor([8.0, 4.0])) == 1.5  # of another process


@pytest.mark.parametrize(
    ("kls", "factor"),
    [
        ([0.3], 1),  # nothing says yet that it does not rise
        ([0.3, 0.3], 0.5),
        ([0.2, 0.3], 1),
        ([0.3, 0.301], 0.5),  # too slow
        ([0.7, 0.7], 1),
        ([1.4, 1.4], 1),
        ([1.6], 2),
        ([1.5, 1.6], 2),
        ([1.7, 1.6], 2),
        ([1.7, 1.6, 1.55], 2),
        ([0.4, 0.4, 1.7], 1),
    ],
)
def test_the_coefficient_follows_a_kl_that_does_not_come_to_the_target_itself(kls, factor):
    coefficient = KLCoefficient(0.1, target=1.0)
    for kl in kls:
        coefficient.adapt(kl)
    assert coefficient.value == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("start", [0.01, 0.2, 10.0])
@pytest.mark.parametrize("pace", [0.02, 0.5])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_kl_that_answers_slowly_comes_to_its_target(start, pace, noise):
    """A policy that makes a part of its way to a KL of 1 / coefficient in each update, a tenth of a nat at most."""
    coefficient, kls, random = KLCoefficient(start, target=5.0), [0.0], Random(0)
    for _ in range(600):
        coefficient.adapt(random.gauss(kls[-1], noise))
        kls.append(kls[-1] + max(-0.1, min(0.1, pace * (1 / coefficient.value - kls[-1]))))
    assert 5 / 1.5 < fmean(kls[200:]) < 5 * 1.5


def test_a_kl_that_never_answers_leaves_the_coefficient_in_reach():
    low, high = KLCoefficient(0.1, target=1.0), KLCoefficient(0.1, target=1.0)
    for _ in range(2000):
        low.adapt(0.0)
        high.adapt(100.0)
    assert (low.value, high.value) == (pytest.approx(0.1 / 1024), pytest.approx(102.4))


def test_without_a_target_the_coefficient_stays():
    coefficient = KLCoefficient(0.1, target=None)
    coefficient.adapt(100.0)
    assert coefficient.value == 0.1


@pytest.mark.parametrize("changes", [{"kl_coef": 1.0}, {"target_kl": None}])
def test_a_coefficient_that_is_given_anew_begins_anew(workplace, tiny_model, changes):
    settings = {"target_kl": 1e-6, "kl_coef": 0.01, "save_every": 1, "reward": "rewards_for_tests:varied"}
    train(config(tiny_model, "run", RLOOConfig, updates=2, **settings))
    train(config(tiny_model, "run", RLOOConfig, updates=3, resume=True, **(settings | changes)))
    adapted = [step.get("kl_coef") for step in metrics("run")]
    assert adapted[:2] == [pytest.approx(0.01), pytest.approx(0.02)]
    assert adapted[2] == (pytest.approx(2.0) if "kl_coef" in changes else None)


def test_a_resumed_run_can_have_a_target_that_it_began_without(workplace, tiny_model):
    settings = {"kl_coef": 0.01, "save_every": 1, "reward": "rewards_for_tests:varied"}
    train(config(tiny_model, "run", updates=2, **settings))
    train(config(tiny_model, "run", updates=3, target_kl=1e-6, resume=True, **settings))
    assert [step.get("kl_coef") for step in metrics("run")] == [None, None, pytest.approx(0.02)]


@pytest.mark.parametrize("config_class", [P3OConfig, RLOOConfig, PPOConfig])
def test_an_adapted_coefficient_is_logged_and_resumed(workplace, tiny_model, config_class):
    settings = {"target_kl": 1e-3, "kl_coef": 0.01, "reward": "rewards_for_tests:varied"}
    train(config(tiny_model, "whole", config_class, updates=3, save_every=2, **settings))
    steps, coefficient = metrics("whole"), KLCoefficient(0.01, target=1e-3)
    for step in steps:
        coefficient.adapt(step["kl"])
        assert step["kl_coef"] == pytest.approx(coefficient.value)
    assert len({step["kl_coef"] for step in steps}) > 1
    copy_at_save_before("whole", "resumed")
    train(config(tiny_model, "resumed", config_class, updates=3, resume=True, **settings))
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))


def test_groups_of_equal_rewards_are_sampled_again(workplace, tiny_model):
    settings = {"updates": 2, "learning_rate": 1e-5, "responses_per_prompt": 2}
    for folder, attempts in (("never", 0), ("thrice", 3)):
        train(config(tiny_model, folder, DAPOConfig, dynamic_sampling=attempts, **settings))
    for never, thrice in zip(metrics("never"), metrics("thrice"), strict=True):
        assert "sampled_again" not in never
        assert 0 < thrice["tied_prompts"] < never["tied_prompts"]
        # All that were tied once, and fewer in each of three attempts.
        assert never["tied_prompts"] < thrice["sampled_again"] < 3 * never["tied_prompts"]


def test_rewards_that_are_always_equal_end_dynamic_sampling(workplace, tiny_model):
    train(config(tiny_model, "run", DAPOConfig, updates=1, reward="rewards_for_tests:constant", dynamic_sampling=2))
    (step,) = metrics("run")
    assert step["tied_prompts"] == 1
    assert step["sampled_again"] == 2


@pytest.mark.parametrize("config_class", [GRPOPlusConfig, PPOConfig, RLOOConfig, P3OConfig])
def test_responses_that_were_cut_off_can_be_left_out(workplace, tiny_model, config_class):
    """None of the tiny model's responses comes to its end: nothing is left to learn."""
    settings = {"updates": 1, "mask_truncated": True, "kl_coef": 0.0, "weight_decay": 0.0, "dynamic_sampling": 0}
    train(config(tiny_model, "run", config_class, **settings))
    (step,) = metrics("run")
    assert step["missing_eos"] == 1
    assert step["loss"] == step["grad_norm"] == 0
    assert_equal(weights_of_start(tiny_model), weights("run"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_reference_that_becomes_the_policy(workplace, tiny_model, precision):
    """The KL to the earlier policy is 0 before an update after which the reference follows."""
    settings = {"precision": precision, "reward": "rewards_for_tests:varied", "eval_prompts": "prompts.jsonl"}
    train(config(tiny_model, "whole", reference_every=2, updates=5, eval_every=1, save_every=3, **settings))
    assert [step["kl"] == 0 for step in metrics("whole")] == [True, False, True, False, True]
    # Evaluations tell the way from the start.
    assert [evaluation["kl"] == 0 for evaluation in metrics("whole", "eval.jsonl")] == [True] + [False] * 5
    copy_at_save_before("whole", "resumed")
    train(config(tiny_model, "resumed", reference_every=2, updates=5, eval_every=1, resume=True, **settings))
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_reference_that_is_a_mean_of_what_the_policy_was(workplace, tiny_model, precision):
    settings = {"precision": precision, "reward": "rewards_for_tests:varied", "updates": 4}
    for folder, decay in (("stays", 0.0), ("slow", 0.99), ("fast", 0.2)):
        train(config(tiny_model, folder, reference_decay=decay, kl_coef=0.0, save_every=2, **settings))
    stays, slow, fast = (metrics(folder)[-1]["kl"] for folder in ("stays", "slow", "fast"))
    assert 0 < fast < slow < stays
    copy_at_save_before("fast", "resumed")
    train(config(tiny_model, "resumed", reference_decay=0.2, kl_coef=0.0, resume=True, **settings))
    assert metrics("fast") == metrics("resumed")


def test_a_pretraining_mix_raises_the_likelihood_of_its_texts(workplace, tiny_model):
    settings = {"reward": "rewards_for_tests:constant", "updates": 6}
    mix = {"ptx_data": "sft.jsonl", "ptx_batch_size": 3, "ptx_coef": 0.5}
    train(config(tiny_model, "whole", **settings, **mix, save_every=3))
    losses = [step["ptx_loss"] for step in metrics("whole")]
    assert losses[-1] < 0.8 * losses[0]
    train(config(tiny_model, "rows", **settings, **mix, tokens_per_row=1))
    assert [step["ptx_loss"] for step in metrics("rows")] == pytest.approx(losses, rel=1e-4)
    copy_at_save_before("whole", "resumed")
    train(config(tiny_model, "resumed", **settings, **mix, resume=True))
    assert metrics("whole") == metrics("resumed")


def test_the_first_step_of_a_round_has_ratios_of_one_by_definition(workplace, tiny_model, monkeypatch):
    """The weights are, up to rounding, those with the rows' old log-probs. Ratios to what sampled are computed."""
    own = []

    def noting(hidden, head, labels, cu_seqlens, old_logprobs, *arguments, **options):
        own.append(old_logprobs is None)
        return linear_p3o_loss(hidden, head, labels, cu_seqlens, old_logprobs, *arguments, **options)

    linear_p3o_loss = p3o.linear_p3o_loss
    monkeypatch.setattr(p3o, "linear_p3o_loss", noting)
    train(config(tiny_model, "run", updates=2))
    assert own == [True, False, False, False] * 2
    train(config(tiny_model, "sampler", updates=1, old_logprobs="sampler"))
    assert not any(own[8:])
    monkeypatch.setattr(p3o.P3O, "first_loss", p3o.P3O.loss)
    train(config(tiny_model, "other way", updates=2))
    assert not any(own[8:])
    first, second = weights("run"), weights("other way")
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)
