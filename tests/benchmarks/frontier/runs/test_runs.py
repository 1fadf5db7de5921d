"""From a planned run to its record, and from records to the chosen learning rates."""

import json
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.frontier import duels, optimum, plan, run, runs, synthetic, tasks
from benchmarks.frontier.language import Language
from benchmarks.frontier.plan import Run
from benchmarks.frontier.records import name_of
from benchmarks.frontier.tasks import Task

START = Run("language-0", "joint", 1e-3, 0.03, 0, prompts_per_update=8)


@pytest.fixture
def task(tmp_path, monkeypatch) -> Task:
    """An untrained model, and the language's utility as reward."""
    language, rng = Language(0), np.random.default_rng(0)
    tokenizer = synthetic.make_tokenizer()
    for name in ("policy", "prompts.train.jsonl", "prompts.eval.jsonl"):
        if name == "policy":
            tokenizer.save_pretrained(tmp_path / name)
            synthetic.make_model(tokenizer, 0).save_pretrained(tmp_path / name)
        else:
            synthetic.write(tmp_path / name, [{"prompt": prompt} for prompt in language.prompts(16, rng)])
    (tmp_path / "length.py").write_text("def reward(prompts, responses):\n    return [len(r) / 8 for r in responses]\n")
    monkeypatch.chdir(tmp_path)
    small = {"updates": 2, "inner_epochs": 1, "eval_at": "1", "eval_samples": 2, "max_response_tokens": 8}
    monkeypatch.setitem(tasks.ROLLOUTS, "languages", {"max_prompt_tokens": 16} | small)
    return Task(
        name="language-0",
        policy=str(tmp_path / "policy"),
        reward_model="length:reward",
        prompts=str(tmp_path / "prompts.train.jsonl"),
        eval_prompts=str(tmp_path / "prompts.eval.jsonl"),
        reward_mean=1.5,
        reward_std=2.0,
        gold=language.utility,
    )


def test_a_run_is_recorded_with_its_evaluations_and_weights(task, tmp_path):
    record = runs.record_of(START, task, tmp_path / "trained")
    json.dumps(record)
    assert name_of(record) == START.name
    assert [evaluation["step"] for evaluation in record["evaluations"]] == [0, 1, 2]
    assert {"reward", "gold", "kl", "missing_eos", "prompts"} <= record["evaluations"][0].keys()
    assert [path.name for path in (tmp_path / "trained").iterdir()] == [START.name]
    assert Path(tmp_path / "trained" / START.name / "model" / "model.safetensors").exists()
    assert runs.record_of(START, task, tmp_path / "trained")["sha256"] == record["sha256"]


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_run(task, tmp_path):
    whole = runs.record_of(START, task, tmp_path / "whole")
    early = runs.record_of(START, task, tmp_path / "early", updates=1)
    assert early["evaluations"] == whole["evaluations"][:2]


def test_runs_stop_where_they_cross_a_kl():
    steps = [(0, 0.0), (2, 1.0), (10, 5.0), (20, 3.0), (30, 6.0)]
    record = vars(START) | {"evaluations": [{"step": step, "kl": kl} for step, kl in steps]}
    assert duels.update_at(record, 4.0) == 8
    assert duels.update_at(record, 5.0) == 10
    with pytest.raises(ValueError, match=f"{START.name}: no evaluation reached KL 8"):
        duels.update_at(record, 8.0)


def test_win_rates_take_the_place_of_those_of_the_same_duel(tmp_path):
    path, duel = tmp_path / "win_rates.json", {"task": "languages", "equal_kl": None}
    run.write_win_rates([duel | {"win_rate": 0.4}], path)
    run.write_win_rates([duel | {"equal_kl": 4.0, "win_rate": 0.6}], path)
    run.write_win_rates([duel | {"win_rate": 0.5}], path)
    assert [(one["equal_kl"], one["win_rate"]) for one in run.win_rates_in(path)] == [(4.0, 0.6), (None, 0.5)]


def test_some_of_the_main_runs_are_no_comparison(tmp_path):
    """What --only leaves in a folder of results of its own."""
    some = list(plan.main("languages"))[:3]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(vars(one)) + "\n" for one in some))
    run.compare_finished(None, "languages", Namespace(results=tmp_path, runs=tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]


def test_win_rates_are_means_over_seeds_of_every_rival(task, tmp_path):
    trained = replace(START, learning_rate=3e-2)
    runs.record_of(trained, task, tmp_path)
    players = {}
    for seed, kl in ((0, 2.0), (1, 3.0)):
        players[replace(trained, seed=seed)] = duels.Player(duels.model_of(trained, tmp_path), kl)
        players[replace(trained, seed=seed, algorithm="ppo")] = duels.Player(task.policy, 1.0)
    with ThreadPoolExecutor(1) as pool:
        rows = duels.win_rates(pool, {task.name: task}, players, equal_kl=None)
    assert [(row["second"], row["by"]) for row in rows] == list(product(("ppo", "sft"), ("reward", "gold")))
    for row in rows:
        assert (row["task"], row["first"], row["seeds"], row["first_kl"]) == ("languages", "joint", 2, 2.5)
        assert row["low"] <= row["win_rate"] <= row["high"]
    assert [row["second_kl"] for row in rows] == [1.0, 1.0, 0.0, 0.0]
    # This PPO is the start itself.
    assert [row["win_rate"] for row in rows[:2]] == [row["win_rate"] for row in rows[2:]]
    assert rows[0]["win_rate"] != 0.5


@pytest.mark.parametrize(("algorithm", "moves"), [("joint", False), ("none", False), ("dpo", False), ("ppo", True)])
def test_an_offset_moves_ppo_alone(task, tmp_path, algorithm, moves):
    plain = replace(START, algorithm=algorithm)
    shifted = replace(plain, offset="unlearnable", offset_sd=10.0)
    hashes = {runs.record_of(run, task, tmp_path)["sha256"] for run in (plain, shifted)}
    assert (len(hashes) == 2) == moves


def evaluations(kls: list[float], per_nat: float) -> list[dict]:
    return [{"step": step, "kl": kl, "reward": per_nat * kl} for step, kl in enumerate(kls)]


def test_the_rate_with_the_highest_gain_that_gets_far_enough_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SETTINGS", tmp_path / "settings.json")
    far, short, late = [0.0, 1.0, 5.0, 9.0], [0.0, 1.0, 5.0], [0.0, 4.5, 9.0]
    made = {7.5e-5: (short, 9.0), 1.5e-4: (far, 2.0), 3e-4: (far, 3.0), 6e-4: (far, 1.0), 1.2e-3: (late, 9.0)}
    records = [vars(one) | {"evaluations": evaluations(*made[one.learning_rate])} for one in plan.rates("languages")]
    run.choose_rates("languages", records)
    chosen = json.loads((tmp_path / "settings.json").read_text())
    assert chosen == {"languages": dict.fromkeys(plan.ALGORITHMS, 3e-4)}
    with pytest.raises(RuntimeError, match="no rate of joint gets beyond KL 4"):
        run.choose_rates("languages", [one | {"evaluations": evaluations(short, 1.0)} for one in records])


def test_recorded_runs_are_not_run_again(tmp_path):
    again = replace(START, seed=1)
    (tmp_path / "runs.jsonl").write_text(json.dumps(vars(START)) + "\n")
    assert run.waiting([START, again, again], tmp_path / "runs.jsonl") == [again]
    assert run.waiting([START], tmp_path / "none.jsonl") == [START]


def test_every_part_names_each_run_once(monkeypatch):
    chosen = {group: dict.fromkeys(plan.ALGORITHMS, 3e-4) for group in plan.GROUPS}
    monkeypatch.setattr(plan, "settings", lambda: chosen)
    for group in plan.GROUPS:
        for part in plan.PARTS.values():
            names = [one.name for one in part(group)]
            assert names
            assert len(names) == len(set(names))


def test_the_optimum_of_two_responses_is_the_one_in_closed_form():
    rewards = np.array([[0.0, 1.0]])
    found = optimum.point(rewards, beta=0.5)
    p = 1 / (1 + np.exp(-2.0))
    assert found["reward_gain"] == pytest.approx(p - 0.5, rel=1e-4)
    assert found["kl"] == pytest.approx(p * np.log(2 * p) + (1 - p) * np.log(2 - 2 * p), rel=1e-4)
    assert found["ess"] == pytest.approx(1 / (p**2 + (1 - p) ** 2), rel=1e-4)


def test_equal_rewards_have_nothing_to_gain():
    found = optimum.point(np.ones((2, 8)), beta=0.1)
    assert (found["kl"], found["reward_gain"], found["ess"]) == pytest.approx((0, 0, 8), abs=1e-9)
