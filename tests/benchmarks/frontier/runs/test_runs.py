"""From a planned run to its record, and from records to the chosen learning rates."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.frontier.runs import choice, duels, execute, plan
from benchmarks.frontier.runs.one_run import train_and_record
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import to_frames
from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks import task as tasks
from benchmarks.frontier.tasks.groups import GROUPS
from benchmarks.frontier.tasks.language import Language
from benchmarks.frontier.tasks.task import Task

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
            synthetic.write_jsonl(tmp_path / name, [{"prompt": prompt} for prompt in language.prompts(16, rng)])
    (tmp_path / "length.py").write_text("def reward(prompts, responses):\n    return [len(r) / 8 for r in responses]\n")
    monkeypatch.chdir(tmp_path)
    small = {"updates": 2, "inner_epochs": 1, "eval_at": "1", "eval_responses_per_prompt": 2, "max_response_tokens": 8}
    monkeypatch.setitem(tasks.TASK_SETTINGS, "languages", {"max_prompt_tokens": 16} | small)
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
    record = train_and_record(START, task, tmp_path / "trained")
    json.dumps(record)
    assert to_frames([record]).runs["name"].tolist() == [START.name]
    assert [evaluation["step"] for evaluation in record["evaluations"]] == [0, 1, 2]
    assert {"reward", "gold", "kl", "missing_eos", "prompts"} <= record["evaluations"][0].keys()
    assert [path.name for path in (tmp_path / "trained").iterdir()] == [START.name]
    assert Path(tmp_path / "trained" / START.name / "model" / "model.safetensors").exists()
    assert train_and_record(START, task, tmp_path / "trained")["sha256"] == record["sha256"]


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_run(task, tmp_path):
    whole = train_and_record(START, task, tmp_path / "whole")
    early = train_and_record(START, task, tmp_path / "early", updates=1)
    assert early["evaluations"] == whole["evaluations"][:2]


def test_runs_stop_where_they_cross_a_kl():
    steps = [(0, 0.0), (2, 1.0), (10, 5.0), (20, 3.0), (30, 6.0)]
    evaluations = [{"step": step, "kl": kl} for step, kl in steps]
    assert duels.update_at(START.name, evaluations, 4.0) == 8
    assert duels.update_at(START.name, evaluations, 5.0) == 10
    with pytest.raises(ValueError, match=f"{START.name}: no evaluation reached KL 8"):
        duels.update_at(START.name, evaluations, 8.0)


def test_win_rates_take_the_place_of_those_of_the_same_duel(tmp_path):
    path, duel = tmp_path / "win_rates.json", {"task": "languages", "equal_kl": None}
    execute.write_win_rates([duel | {"win_rate": 0.4}], path)
    execute.write_win_rates([duel | {"equal_kl": 4.0, "win_rate": 0.6}], path)
    execute.write_win_rates([duel | {"win_rate": 0.5}], path)
    assert [(one["equal_kl"], one["win_rate"]) for one in execute.read_win_rates(path)] == [(4.0, 0.6), (None, 0.5)]


def test_some_runs_of_all_algorithms_are_no_comparison(tmp_path):
    """What --only leaves in a folder of results of its own."""
    some = list(plan.algorithms("languages"))[:3]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(vars(one)) + "\n" for one in some))
    execute.compare_finished(None, "languages", tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]


def test_win_rates_are_means_over_seeds_of_every_rival(task, tmp_path):
    trained = replace(START, learning_rate=3e-2)
    train_and_record(trained, task, tmp_path)
    players = {}
    for seed, kl in ((0, 2.0), (1, 3.0)):
        players[replace(trained, seed=seed)] = duels.Player(duels.model_folder(trained, tmp_path), kl)
        players[replace(trained, seed=seed, algorithm="ppo")] = duels.Player(task.policy, 1.0)
    with ThreadPoolExecutor(1) as pool:
        rates = duels.win_rates(pool, {task.name: task}, players, equal_kl=None)
    assert [(rate["second"], rate["by"]) for rate in rates] == list(product(("ppo", "sft"), ("reward", "gold")))
    for rate in rates:
        assert (rate["task"], rate["first"], rate["seeds"], rate["first_kl"]) == ("languages", "joint", 2, 2.5)
        assert rate["low"] <= rate["win_rate"] <= rate["high"]
    assert [rate["second_kl"] for rate in rates] == [1.0, 1.0, 0.0, 0.0]
    # This PPO is the start itself.
    assert [rate["win_rate"] for rate in rates[:2]] == [rate["win_rate"] for rate in rates[2:]]
    assert rates[0]["win_rate"] != 0.5


@pytest.mark.parametrize(("algorithm", "moves"), [("joint", False), ("none", False), ("dpo", False), ("ppo", True)])
def test_an_offset_moves_ppo_alone(task, tmp_path, algorithm, moves):
    plain = replace(START, algorithm=algorithm)
    shifted = replace(plain, offset="unlearnable", offset_sd=10.0)
    hashes = {train_and_record(run, task, tmp_path)["sha256"] for run in (plain, shifted)}
    assert (len(hashes) == 2) == moves


def evaluations(kls: list[float], per_nat: float) -> list[dict]:
    return [{"step": step, "kl": kl, "reward": per_nat * kl} for step, kl in enumerate(kls)]


def test_the_rate_with_the_highest_gain_that_gets_far_enough_is_chosen(tmp_path, monkeypatch):
    for module in (plan, choice):
        monkeypatch.setattr(module, "SETTINGS", tmp_path / "settings.json")
    far, short, late = [0.0, 1.0, 5.0, 9.0], [0.0, 1.0, 5.0], [0.0, 4.5, 9.0]
    made = {7.5e-5: (short, 9.0), 1.5e-4: (far, 2.0), 3e-4: (far, 3.0), 6e-4: (far, 1.0), 1.2e-3: (late, 9.0)}
    records = [vars(one) | {"evaluations": evaluations(*made[one.learning_rate])} for one in plan.rates("languages")]
    choice.choose_rates("languages", to_frames(records))
    chosen = json.loads((tmp_path / "settings.json").read_text())
    assert chosen == {"languages": dict.fromkeys(plan.ALGORITHMS, 3e-4)}
    too_short = to_frames(one | {"evaluations": evaluations(short, 1.0)} for one in records)
    with pytest.raises(RuntimeError, match="no rate of joint gets beyond KL 4"):
        choice.choose_rates("languages", too_short)


def test_recorded_runs_are_not_run_again(tmp_path):
    again = replace(START, seed=1)
    (tmp_path / "runs.jsonl").write_text(json.dumps(vars(START)) + "\n")
    assert execute.waiting([START, again, again], tmp_path / "runs.jsonl") == [again]
    assert execute.waiting([START], tmp_path / "none.jsonl") == [START]


def test_every_part_names_each_run_once(monkeypatch):
    chosen = {group: dict.fromkeys(plan.ALGORITHMS, 3e-4) for group in GROUPS}
    monkeypatch.setattr(plan, "chosen_rates", lambda: chosen)
    for group in GROUPS:
        for part in plan.PARTS.values():
            names = [one.name for one in part(group)]
            assert names
            assert len(names) == len(set(names))
