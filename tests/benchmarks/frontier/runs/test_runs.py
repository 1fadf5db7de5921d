"""From a planned run to its record, and from records to the chosen learning rates."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks.frontier.runs import choice, duels, equal_kl, execute, plan, stale, tuned_arms, tuning
from benchmarks.frontier.runs.one_run import configuration, train_and_record
from benchmarks.frontier.runs.parts import PARTS, PLAN, parts_of
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import to_frames
from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks import task as tasks
from benchmarks.frontier.tasks.groups import RETUNED, STUDIED
from benchmarks.frontier.tasks.language import Language
from benchmarks.frontier.tasks.task import Task

ROOT = Path(__file__).parents[4]
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
    record = json.loads(json.dumps(record))
    assert to_frames([record]).runs["name"].tolist() == [START.name]
    assert [evaluation["step"] for evaluation in record["evaluations"]] == [0, 1, 2]
    assert {"reward", "gold", "kl", "missing_eos", "prompts"} <= record["evaluations"][0].keys()
    costs = to_frames([record]).evaluations[["seconds", "response_tokens"]]
    assert (costs.diff()[1:] > 0).all(axis=None)
    assert costs.iloc[0].tolist() == [0, 0]
    assert [path.name for path in (tmp_path / "trained").iterdir()] == [START.name]
    assert Path(tmp_path / "trained" / START.name / "model" / "model.safetensors").exists()
    assert train_and_record(START, task, tmp_path / "trained")["sha256"] == record["sha256"]


def test_a_run_that_stops_early_is_the_beginning_of_the_whole_run(task, tmp_path):
    whole = train_and_record(START, task, tmp_path / "whole")
    early = train_and_record(START, task, tmp_path / "early", updates=1)
    assert early["evaluations"] == whole["evaluations"][:2]


def test_a_run_that_stops_early_is_not_evaluated_behind_its_end(task, tmp_path, monkeypatch):
    settings = tasks.TASK_SETTINGS["languages"] | {"updates": 3, "eval_at": "1,2"}
    monkeypatch.setitem(tasks.TASK_SETTINGS, "languages", settings)
    assert configuration(START, task, tmp_path, updates=1).evaluated_at == {1}


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


@pytest.mark.parametrize(
    ("algorithm", "moves"),
    [
        ("joint", False),
        ("rloo", False),
        ("ppo", True),
        *(pytest.param(name, False, marks=pytest.mark.nightly) for name in ("none", "dpo", "dapo", "rebel")),
    ],
)
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
    chosen = {group: dict.fromkeys(plan.ALGORITHMS, 3e-4) for group in STUDIED}
    monkeypatch.setattr(plan, "chosen_rates", lambda: chosen)
    monkeypatch.setattr(tuning, "tuned", lambda: TUNED)
    assert {name for group in PLAN for name in parts_of(group)} == set(PARTS)
    monkeypatch.setattr(tuned_arms, "chosen", lambda: CHOSEN)
    monkeypatch.setattr(tuned_arms, "chosen_rate", lambda arm: 3e-4)
    for group, parts in PLAN.items():
        for part in parts.values():
            names = [one.name for one in part(group)]
            assert names
            assert len(names) == len(set(names))


SLOW = equal_kl.settings("joint", 0.0)[0]
CHOSEN = {
    "corrections": {stale.label(*pair): "weights" for pair in stale.COMPARED},
    "slow_settings": {SLOW.name: 0.5},
    "equal_kl": {stale.label(*pair): {"1": vars(equal_kl.settings(*pair)[0])} for pair in equal_kl.EVERYONE},
}
SETTING = {"learning_rate": 6e-4, "kl_coef": 0.3, "own_parameter": 0.0}
TUNED = {
    RETUNED: {
        "own_parameters": {"rebel": {"1": 1.0, "2": 3.0}, "gspo": {"1": 0.01, "2": 0.01}},
        "settings": {name: {"1": SETTING, "2": SETTING | {"kl_coef": 0.1}} for name in plan.EVERYONE},
    }
}


def test_parts_that_need_a_choice_say_which_part_makes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned.json")
    with pytest.raises(ValueError, match="no parameter of gspo for retuned: run the part `own_parameters` first"):
        list(tuning.trial_rates(RETUNED))
    with pytest.raises(ValueError, match="no settings of joint for retuned: run the part `trial_rates` first"):
        list(tuning.envelope(RETUNED))


def test_what_is_as_by_default_is_not_in_a_name():
    assert START.name == "language-0-joint-0.001-0.03-0-none-0-2-8"
    assert (
        replace(START, own_parameter=0.5, reward_factor=10.0).name == START.name + "-own_parameter=0.5-reward_factor=10"
    )
    earlier = {name: value for name, value in vars(START).items() if name not in plan.LATER}
    assert to_frames([earlier]).runs["name"].tolist() == [START.name]


@pytest.mark.parametrize(
    ("algorithm", "own", "set_to"),
    [
        *((name, 0.0, {}) for name in ("dr_grpo", "dapo", "joint-difference")),
        ("rloo", 0.0, {"inner_epochs": 1, "kl_estimator": "k1"}),
        ("joint_once", 0.0, {"clipping": "joint", "inner_epochs": 1, "reward_scaling": "none"}),
        ("grpo", 0.0, {"inner_epochs": 4, "kl_estimator": "k3"}),
        ("grpo", 0.1, {"clip_low": 0.1, "clip_high": 0.1}),
        ("rebel", 3.0, {"eta": 3.0}),
        ("gspo", 0.01, {"clip_low": 0.01, "clip_high": 0.01}),
        ("separate", 0.5, {"clipping": "separate", "clip_range": 0.5, "reward_scaling": "none"}),
        ("ppo_narrow", 0.0, {"clip_range": 0.1, "critic_learning_rate": 2e-3}),
        ("ppo", 0.5, {"clip_range": 0.5, "critic_learning_rate": 2e-3}),
    ],
)
def test_runs_name_objectives_and_their_own_parameters(task, tmp_path, monkeypatch, algorithm, own, set_to):
    monkeypatch.setitem(tasks.TASK_SETTINGS, "languages", tasks.TASK_SETTINGS["languages"] | {"inner_epochs": 4})
    run = replace(START, algorithm=algorithm, own_parameter=own, responses_per_prompt=4)
    config = configuration(run, task, tmp_path)
    assert {name: getattr(config, name) for name in set_to} == set_to
    assert (config.learning_rate, config.kl_coef, config.responses_per_prompt) == (1e-3, 0.03, 4)


@pytest.mark.parametrize(
    ("algorithm", "correction", "set_to"),
    [
        ("joint", "none", {"old_logprobs": "policy", "sampler_ratio_cap": 0.0, "rounds_ahead": 6}),
        ("joint", "ratios", {"old_logprobs": "sampler", "sampler_ratio_cap": 0.0}),
        ("joint", "weights", {"old_logprobs": "policy", "sampler_ratio_cap": 10.0}),
        ("ppo", "weights", {"sampler_ratio_cap": 2.0}),
        ("gspo", "weights", {"sampler_ratio_cap": 10.0}),
        ("rloo", "weights", {"sampler_ratio_cap": 10.0, "inner_epochs": 1}),
    ],
)
def test_stale_rollouts_are_corrected_as_their_runs_say(task, tmp_path, monkeypatch, algorithm, correction, set_to):
    monkeypatch.setitem(tasks.TASK_SETTINGS, "languages", tasks.TASK_SETTINGS["languages"] | {"sampler": "engine"})
    run = replace(START, algorithm=algorithm, correction=correction, rounds_ahead=6)
    config = configuration(run, task, tmp_path)
    assert {name: getattr(config, name) for name in set_to} == set_to
    assert run.name == START.name.replace("joint", algorithm) + "-rounds_ahead=6" + (
        "" if correction == "none" else f"-correction={correction}"
    )


def test_passes_over_a_round_are_the_runs_or_the_algorithms(task, tmp_path):
    of_rloo = replace(START, algorithm="rloo")
    assert configuration(of_rloo, task, tmp_path).inner_epochs == 1
    assert configuration(replace(of_rloo, inner_epochs=16), task, tmp_path).inner_epochs == 16
    assert tuned_arms.rates_of(of_rloo) == tuple(2 * rate for rate in tuned_arms.RATES)
    assert tuned_arms.rates_of(replace(START, inner_epochs=16)) == tuple(rate / 2 for rate in tuned_arms.RATES)


def test_corrections_and_rates_are_those_with_the_most_of_what_training_maximises(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_arms, "CHOSEN", tmp_path / "tuned_arms.json")
    with pytest.raises(ValueError, match="has no corrections: run the part `corrections` first"):
        list(stale.at_lag(2))
    liked = {"none": 2.0, "ratios": 1.0, "weights": 1.5}

    def recorded(run: Run) -> dict:
        gain = (
            liked[run.correction] + (run.learning_rate == 6e-4) - (run.algorithm == "none") * (run.correction == "none")
        )
        ends = [{"step": step, "kl": 3.0 * step, "reward": step * (gain + 0.3), "missing_eos": 0.0} for step in (0, 1)]
        return vars(run) | {"evaluations": ends}

    choice.choose_corrections("many_languages", to_frames(map(recorded, stale.corrections("many_languages"))))
    found = json.loads((tmp_path / "tuned_arms.json").read_text())["corrections"]
    assert found.pop("none") == "weights"
    assert set(found.values()) == {"none"}
    arm = tuned_arms.arm("ppo", rounds_ahead=2)
    with pytest.raises(ValueError, match=f"has no rate of {arm.name}"):
        list(tuned_arms.results([arm]))
    choice.choose_rates_of(lambda: [arm], "many_languages", to_frames(map(recorded, tuned_arms.trials([arm]))))
    runs = list(tuned_arms.results([arm]))
    assert [(run.seed, run.task[-1], run.learning_rate) for run in runs] == [(n, str(n), 6e-4) for n in range(8)]
    assert "corrections" in json.loads((tmp_path / "tuned_arms.json").read_text())


def test_slow_settings_get_more_updates_instead_of_being_ruled_out(task, tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_arms, "CHOSEN", tmp_path / "tuned_arms.json")

    def recorded(run: Run) -> dict:
        """Half a nat an evaluation, or a quarter at the lowest rate, where a nat is worth more."""
        slow = run.learning_rate == min(tuned_arms.rates_of(run))
        ends = [
            {"step": n, "kl": n * (0.25 if slow else 0.5), "missing_eos": 0.0} for n in range(9 + 4 * bool(run.updates))
        ]
        worth = 2.0 if slow else 1.0
        return vars(run) | {"evaluations": [one | {"reward": one["kl"] * worth} for one in ends]}

    trials = list(map(recorded, equal_kl.equal_kl_trials("many_languages")))
    choice.choose_slow_settings("many_languages", to_frames(trials))
    longer = list(equal_kl.equal_kl_longer("many_languages"))
    assert len(longer) == 2 * 3 * len(equal_kl.EVERYONE)
    assert {run.updates for run in longer} == {40}
    choice.choose_at_equal_kl("many_languages", to_frames([*trials, *map(recorded, longer)]))
    runs = list(equal_kl.equal_kl("many_languages"))
    assert len(runs) == 8 * len(equal_kl.EVERYONE), "the same setting is best at both KLs"
    assert all(run.learning_rate == min(tuned_arms.rates_of(run)) for run in runs)
    monkeypatch.setitem(tasks.TASK_SETTINGS, "languages", tasks.TASK_SETTINGS["many_languages"])
    config = configuration(replace(runs[0], task="language-0"), task, tmp_path)
    assert (config.updates, config.eval_at) == (40, "2,4,7,10,14,20,28")


def test_gains_are_those_of_rewards_before_they_are_multiplied(task, tmp_path):
    record, larger = (
        train_and_record(replace(START, algorithm="dpo", reward_factor=factor), task, tmp_path)
        for factor in (1.0, 10.0)
    )
    assert larger["evaluations"][0]["reward"] == pytest.approx(10 * record["evaluations"][0]["reward"])
    assert larger["sha256"] == record["sha256"], "DPO reads which reward is higher"
    gains = [to_frames([one]).evaluations["reward_gain"] for one in (record, larger)]
    assert gains[0].tolist() == pytest.approx(gains[1].tolist(), abs=1e-4)


def test_scales_and_means_of_prompts_are_those_of_training_alone(task, tmp_path):
    """The first evaluation, of the same policy, shows plain rewards."""
    plain = train_and_record(START, task, tmp_path)
    for changed in ({"algorithm": "joint-group"}, {"algorithm": "ppo_centred"}, {"reward_spread": 1.0}):
        record = train_and_record(replace(START, **changed), task, tmp_path)
        assert record["evaluations"][0] == plain["evaluations"][0]
        assert record["sha256"] != plain["sha256"]


def trial_records(gains: dict[tuple, float], seeds=(100, 101)) -> list[dict]:
    """Of an algorithm, learning rate, KL coefficient and own parameter the proxy gain a nat."""
    return [
        vars(run) | {"evaluations": evaluations([0.0, 0.5, 1.5, 3.0], per_nat)}
        for (algorithm, rate, kl_coef, own), per_nat in gains.items()
        for run in tuning.trial(RETUNED, algorithm, tuning.Setting(rate, kl_coef, own))
        if run.seed in seeds
    ]


def test_settings_are_chosen_for_each_kl_among_trials_on_the_same_seeds(tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned.json")
    etas = {("rebel", 3e-4, 0.1, eta): gain for eta, gain in ((1.0, 1.0), (3.0, 2.0), (10.0, 1.5))}
    clips = {("gspo", 3e-4, 0.1, clip): gain for clip, gain in ((0.003, 1.0), (0.01, 1.5), (0.03, 2.0))}
    records = trial_records(etas | clips)
    choice.choose_own_parameters(RETUNED, to_frames(records))
    assert [tuning.own_parameters_of(RETUNED, name) for name in ("rebel", "gspo", "joint")] == [[3.0], [0.03], [0.0]]
    for one in records:
        if one["own_parameter"] == 3.0:
            one["evaluations"] = evaluations([0.0, 0.5, 1.3], 2.0)
    choice.choose_own_parameters(RETUNED, to_frames(records))
    assert tuning.own_parameters_of(RETUNED, "rebel") == [3.0, 10.0], "each KL has its own"
    trials = [run for run in tuning.trial_rates(RETUNED) if run.algorithm == "rebel"]
    assert {run.own_parameter for run in trials} == {3.0, 10.0}
    choice.choose_settings(RETUNED, to_frames(records))
    assert tuning.settings(RETUNED, "rebel") == {1.0: (3e-4, 0.1, 3.0), 2.0: (3e-4, 0.1, 10.0)}
    low, high = ("joint", 3e-4, 0.1, 0.0), ("joint", 6e-4, 0.3, 0.0)
    records += trial_records({low: 1.0, high: 2.0}, seeds=(100,)) + trial_records({low: 3.0}, seeds=(101,))
    choice.choose_settings(RETUNED, to_frames(records))
    chosen = tuning.settings(RETUNED, "joint")
    assert chosen == dict.fromkeys(tuning.ENVELOPE_KLS, (6e-4, 0.3, 0.0)), "seed 101 has not run with both"
    assert "ppo" not in tuning.tuned()[RETUNED]["settings"]
    for one in records:
        if one["learning_rate"] == 6e-4:
            one["evaluations"] = evaluations([0.0, 0.5, 1.3], 2.0)
    choice.choose_settings(RETUNED, to_frames(records))
    assert tuning.settings(RETUNED, "joint") == {1.0: (6e-4, 0.3, 0.0), 2.0: (3e-4, 0.1, 0.0)}, "it must get far enough"


COMMAND = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from benchmarks.frontier.runs.worker import begin_worker

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=begin_worker) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_workers_end_with_a_command_that_is_killed(tmp_path):
    (tmp_path / "command.py").write_text(COMMAND)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    command = subprocess.Popen([sys.executable, tmp_path / "command.py"], stdout=subprocess.PIPE, env=environment)
    worker = psutil.Process(int(command.stdout.readline()))
    assert worker.is_running()
    command.kill()
    command.communicate()
    deadline = time.monotonic() + 60
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the worker goes on"
        time.sleep(0.1)
