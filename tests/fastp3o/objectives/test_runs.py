"""Short runs of every objective by its name: they resume exactly, and settings do what they say."""

import operator
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.models.loading import load_policy
from fastp3o.objectives.base import Microbatch, mean_kl
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.objectives.config.policy_gradient import DAPOConfig
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.packing.pack import Packing, pack
from fastp3o.training import kl_per_update
from fastp3o.training.loop import train
from fastp3o_kernels import linear_distillation
from tests.fastp3o.runs import (
    assert_equal,
    assert_resumes,
    config,
    metrics,
    weights,
    weights_of_start,
)

VARIED = {"reward": "rewards_for_tests:varied"}
NEW = sorted(OBJECTIVES.keys() - {"p3o", "ppo", "trpo"})  # those have runs of their own
# None of the tiny model's responses comes to its end.
SETTINGS = {
    "ppg": {"prompts_per_minibatch": 0, "inner_epochs": 1},
    "grpo_plus": {"mask_truncated": False},
    "distillation": {"teacher_context": "Be brief. "},  # without, it is where it should be
}
# One of each kind of state, and of loss; all at night.
KINDS = {"bpo", "grpo", "nash_md", "reinforce"}


def train_and_resume(
    tiny_model: str, folder: str, config_class: type = P3OConfig, **settings
) -> list[dict]:
    """The metrics of a run, which ends with the same bits if it is interrupted."""
    train(run := config(tiny_model, folder, config_class, **settings))
    assert_resumes(run)
    return metrics(folder)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in KINDS else pytest.mark.nightly) for n in NEW]
)
def test_a_resumed_run_is_the_uninterrupted_one_and_moves_the_policy(workplace, tiny_model, name):
    train_and_resume(
        tiny_model,
        "whole",
        OBJECTIVES[name],
        updates=2,
        save_every=1,
        **VARIED,
        **SETTINGS.get(name, {}),
    )
    end = weights("whole")
    assert not any(torch.equal(end[n], w) for n, w in weights_of_start(tiny_model).items())


def test_rivals_where_rollouts_are_stale_move_the_adapters_of_a_policy(workplace, tiny_model):
    for name in ("cispo", "vespo", "copg", "oapl"):
        settings = {
            "rounds_ahead": 1,
            "lora_rank": 2,
            "temperature": 0.8,
            "kl_coef": 0.01,
            "updates": 3,
            **VARIED,
        }
        train(config(tiny_model, name, OBJECTIVES[name], **settings))
        moved = [abs(step["kl"]) for step in metrics(name)]
        assert moved[0] < 1e-4 < moved[2] < 10, name


@pytest.mark.parametrize(
    ("name", "changes"),
    [("online_dpo", {}), ("p3o", {"reward_clip": 1.0, "responses_per_prompt": 4})],
)
def test_a_shift_of_a_prompts_rewards_leaves_the_same_bits(workplace, tiny_model, name, changes):
    """r(x, y) + δ(x) leaves every preference as it is. On a grid of powers of two, differences are
    exact in fp32.
    """
    settings = {
        "updates": 4,
        "inner_epochs": 2,
        "prompts_per_update": 4,
        "prompts_per_minibatch": 2,
    } | changes
    for folder, reward in (("plain", "varied"), ("shifted", "varied_and_shifted")):
        train(
            config(
                tiny_model,
                folder,
                OBJECTIVES[name],
                reward=f"rewards_for_tests:{reward}",
                **settings,
            )
        )
    assert metrics("plain")[-1]["reward"] != metrics("shifted")[-1]["reward"]
    assert_equal(weights("plain"), weights("shifted"))


def test_the_kl_of_an_update_is_the_mean_over_responses_of_all_microbatches():
    (row,) = pack([[1]] * 2, [[[2, 3], [4]]] * 2, Packing(100))
    zeros, ends = torch.zeros(len(row.labels)), row.cu_seqlens[1:].long() - 1
    rows = [
        Microbatch(row, torch.zeros(2, 2), zeros.index_fill(0, ends, kl), zeros)
        for kl in (1.0, 2.0, 6.0)
    ]
    assert mean_kl([rows[:1], rows[1:]], lambda sums: sums) == 3.0
    # of another process
    assert mean_kl([rows[:1]], lambda sums: sums + torch.tensor([8.0, 4.0])) == 1.5


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
        ([1.7, 1.6, 1.55], 2),
        ([0.4, 0.4, 1.7], 1),
    ],
)
def test_the_coefficient_follows_a_kl_that_does_not_come_to_the_target_itself(kls, factor):
    coefficient, fixed = KLCoefficient(0.1, target=1.0), KLCoefficient(0.1, target=None)
    for kl in kls:
        coefficient.adapt(kl)
        fixed.adapt(kl)
    assert coefficient.value == pytest.approx(0.1 * factor)
    assert fixed.value == 0.1


def test_a_kl_that_never_answers_leaves_the_coefficient_in_reach():
    low, high = KLCoefficient(0.1, target=1.0), KLCoefficient(0.1, target=1.0)
    for _ in range(2000):
        low.adapt(0.0)
        high.adapt(100.0)
    assert (low.value, high.value) == (pytest.approx(0.1 / 1024), pytest.approx(102.4))


def test_a_coefficient_that_is_given_anew_begins_anew():
    adapted, fixed = KLCoefficient(0.1, target=1.0), KLCoefficient(0.1, target=None)
    for kl in (0.3, 0.2):
        adapted.adapt(kl)

    def resumed(value: float, target: float | None, state: KLCoefficient) -> dict:
        coefficient = KLCoefficient(value, target)
        coefficient.load_state_dict(state.state_dict())
        return coefficient.state_dict()

    assert adapted.value == 0.05
    assert resumed(0.1, 2.0, adapted) == adapted.state_dict()
    for value, target, state in ((0.2, 1.0, adapted), (0.1, None, adapted), (0.1, 1.0, fixed)):
        assert resumed(value, target, state) == KLCoefficient(value, target).state_dict()


def test_groups_of_equal_rewards_are_sampled_again_until_attempts_end(workplace, tiny_model):
    settings = {"updates": 2, "learning_rate": 1e-5, "responses_per_prompt": 2}
    for folder, attempts in (("never", 0), ("thrice", 3)):
        train(config(tiny_model, folder, DAPOConfig, dynamic_sampling=attempts, **settings))
    for never, thrice in zip(metrics("never"), metrics("thrice"), strict=True):
        assert "sampled_again" not in never
        assert 0 < thrice["tied_prompts"] < never["tied_prompts"]
        # All that were tied once, and fewer in each of three attempts.
        assert never["tied_prompts"] < thrice["sampled_again"] < 3 * never["tied_prompts"]
    train(
        config(
            tiny_model,
            "run",
            DAPOConfig,
            updates=1,
            reward="rewards_for_tests:constant",
            dynamic_sampling=2,
        )
    )
    (step,) = metrics("run")
    assert (step["tied_prompts"], step["sampled_again"]) == (1, 2)


def test_a_reference_that_becomes_the_policy_or_a_mean_of_what_it_was(workplace, tiny_model):
    """The KL to the earlier policy is 0 before an update after which the reference follows."""
    settings = {
        "updates": 5,
        "save_every": 3,
        "eval_prompts": "prompts.jsonl",
        "eval_every": 1,
        **VARIED,
    }
    steps = train_and_resume(
        tiny_model, "followed", reference_every=2, precision="fp16", **settings
    )
    assert [step["kl"] == 0 for step in steps] == [True, False, True, False, True]
    # Evaluations tell the way from the start.
    assert [evaluation["kl"] == 0 for evaluation in metrics("followed", "eval.jsonl")] == [True] + [
        False
    ] * 5
    mean = train_and_resume(
        tiny_model, "mean", reference_decay=0.2, kl_coef=0.0, precision="bf16", **settings
    )
    train(
        config(tiny_model, "stays", kl_coef=0.0, reference=tiny_model, precision="bf16", **settings)
    )
    # of samples, so it may be below 0
    assert 0 < abs(mean[-1]["kl"]) < metrics("stays")[-1]["kl"] / 2


def test_a_learning_rate_that_is_not_named_is_found():
    named = {"model": "m", "output_dir": "o", "prompts": "p", "reward": "r"}
    for changes, expected in (
        ({}, (1e-6, 0.3)),
        ({"kl_per_update": 0.5}, (1e-6, 0.5)),
        ({"learning_rate": 2e-6}, (2e-6, None)),
        ({"learning_rate": 2e-6, "kl_per_update": 0.5}, (2e-6, 0.5)),
    ):
        made = P3OConfig(**named, **changes)
        assert (made.learning_rate, made.kl_per_update) == expected


@pytest.mark.parametrize("name", ["ppo", "rloo", "p3o"])
def test_learning_rate_and_coefficient_follow_what_updates_move_and_are_resumed(
    workplace, tiny_model, name, monkeypatch, capsys
):
    """At the schedule's peak, and by the KL to the reference. In the first update rates double from
    step to step.
    """
    monkeypatch.setattr(kl_per_update, "FINDING", 2)
    changes = {
        "ppo": {"rounds_ahead": 1},
        "rloo": {"precision": "fp16", "lora_rank": 2, **SETTINGS["ppg"]},
    }
    changes |= {
        "p3o": {
            "old_logprobs": "sampler",
            "clipping": "none",
            "lr_schedule": "linear",
            "warmup_steps": 6,
        }
    }
    settings = {
        "kl_per_update": 0.02,
        "learning_rate": 1e-4,
        "target_kl": 1e-3,
        "kl_coef": 0.01,
        "save_every": 3,
    }
    settings |= {"updates": 4, **VARIED, **changes[name]}
    steps, coefficient = (
        train_and_resume(tiny_model, "whole", OBJECTIVES[name], **settings),
        KLCoefficient(0.01, 1e-3),
    )
    total = 1 if name == "rloo" else 4
    factors = [min(step / 6, (16 - step) / 10) if name == "p3o" else 1.0 for step in range(16)]
    peak = 1e-4
    for number, one in enumerate(steps, 1):
        ends = (
            re.search(r"the first update ends after (\d) steps", capsys.readouterr().out)
            if number == 1
            else None
        )
        made = int(ends[1]) if ends else total
        doubled = [2.0 ** (step + 1 - total) if number == 1 else 1.0 for step in range(made)]
        rates = [peak * double * factors.pop(0) for double in doubled]
        assert one["learning_rate"] == pytest.approx(rates[-1])
        limit = 4.0**8 if number == 1 else 4.0
        change = max(sum(rates) / (total * peak) * (0.02 / one["kl_moved"]) ** 0.5, 1 / limit)
        peak *= min(change, limit if number <= 2 else 1.1)
        coefficient.adapt(one["kl"])
        assert one["kl_coef"] == pytest.approx(coefficient.value)
    assert len({one["kl_coef"] for one in steps}) > 1


def test_a_first_update_ends_too_far_by_the_kl_over_the_vocabulary(
    workplace, tiny_model, monkeypatch, capsys
):
    start, exact = load_policy(tiny_model), []

    def both(optimizer, microbatches):
        models, row = (optimizer.model, start), microbatches[0].row
        with torch.no_grad():
            states = [model(row, row.labeled_at, lambda *own: own) for model in models]
        exact.append(
            linear_distillation(*states[0], *states[1], divergence="forward_kl").sum().item()
            / (4 * 64)
        )
        return measured(optimizer, microbatches)

    measured = kl_per_update.kl_moved
    monkeypatch.setattr(kl_per_update, "kl_moved", both)
    settings = {
        "kl_per_update": 2e-4,
        "learning_rate": 0.01,
        "responses_per_prompt": 64,
        "updates": 2,
    }
    train(config(tiny_model, "run", old_logprobs="sampler", top_p=0.9, **settings, **VARIED))
    (first, second), (*before, moved, _) = metrics("run"), exact
    made = len(before) + 1
    assert max(before, default=0.0) < 2e-4 < moved
    assert f"the first update ends after {made} steps" in capsys.readouterr().out
    assert first["kl_moved"] == pytest.approx(moved, rel=0.1)
    assert first["learning_rate"] == pytest.approx(0.01 * 2.0 ** (made - 4))
    way = 0.01 * (2.0 ** (made - 3) - 1 / 8)
    assert second["learning_rate"] == pytest.approx(way / 4 * (2e-4 / first["kl_moved"]) ** 0.5)
    train(config(tiny_model, "tied", **settings, reward="rewards_for_tests:constant"))
    assert [(step["kl_moved"], step["learning_rate"]) for step in metrics("tied")] == [
        (0.0, 0.01 / 8)
    ] * 2


@given(norms=st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=5), first=st.booleans())
def test_a_rate_follows_the_steps_that_have_a_gradient(norms, first):
    """Where the KL grows as it should, one update finds the rate, whatever steps are tied; without
    any it stays.
    """
    rates, schedule = [], SimpleNamespace(base_lrs=[0.01])
    optimizer = SimpleNamespace(
        accelerator=SimpleNamespace(autocast=nullcontext, print=print),
        schedule=schedule,
        next_learning_rate=lambda: schedule.base_lrs[0],
        set_peak_learning_rate=lambda rate: schedule.base_lrs.__setitem__(0, rate),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            kl_per_update, "kl_moved", lambda *_: (70 * sum(map(operator.mul, rates, norms))) ** 2
        )
        state = kl_per_update.Search(0.01 if first else 0.02)
        search = kl_per_update.LearningRateSearch(
            optimizer, 1.0, state, 1, [[None]], len(norms), "policy"
        )
        for norm in norms:
            search.before_step()
            rates.append(schedule.base_lrs[0])
            if search.after_step({"grad_norm": torch.tensor(norm)}):
                break
    if first:
        tested = [sum(norms[:step]) for step in range(len(rates))]
        assert rates == [0.01 * 2.0 ** (one + 1 - len(norms)) for one in tested]
    assert schedule.base_lrs[0] == pytest.approx(1 / (70 * len(norms)) if any(norms) else 0.01)
