"""From a planned run to its record, and from records to the chosen learning rates."""

import json
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.frontier.runs import choice, execute, one_run, stale, tuned_arms
from benchmarks.frontier.runs.one_run import configuration, train_and_record
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.records import to_frames
from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.language import Language
from benchmarks.frontier.tasks.task import Task

START = Run("many_languages-0", "joint", 1e-3, 0.03, 0, prompts_per_update=8)


@pytest.fixture
def task(tmp_path, monkeypatch) -> Task:
    """An untrained model, and the language's utility as reward."""
    language, rng = Language(0), np.random.default_rng(0)
    tokenizer = synthetic.make_tokenizer()
    tokenizer.save_pretrained(tmp_path / "policy")
    synthetic.make_model(tokenizer, 0).save_pretrained(tmp_path / "policy")
    for name in ("prompts.train.jsonl", "prompts.eval.jsonl"):
        synthetic.write_jsonl(
            tmp_path / name, [{"prompt": prompt} for prompt in language.prompts(16, rng)]
        )
    (tmp_path / "length.py").write_text(
        "def reward(prompts, responses):\n    return [len(r) / 8 for r in responses]\n"
    )
    monkeypatch.chdir(tmp_path)
    small = {
        "inner_epochs": 1,
        "sampler": "transformers",
        "updates": 2,
        "eval_at": "1",
        "max_prompt_tokens": 16,
    }
    monkeypatch.setattr(
        one_run, "SETTINGS", small | {"eval_responses_per_prompt": 2, "max_response_tokens": 8}
    )
    return Task(
        name="many_languages-0",
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
    assert [path.name for path in (tmp_path / "trained").iterdir()] == [START.name]


def test_an_offset_moves_ppo(task, tmp_path):
    plain = replace(START, algorithm="ppo")
    shifted = replace(plain, offset="unlearnable", offset_sd=10.0)
    assert len({train_and_record(run, task, tmp_path)["sha256"] for run in (plain, shifted)}) == 2


CRITIC = {"critic_learning_rate": 1e-3, "value_clip_range": 0.2}
CHOSEN = {
    "corrections": {stale.label(*pair): "weights" for pair in stale.compared(max(stale.LAGS))}
}


def test_every_part_names_each_run_once_and_none_runs_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_arms, "chosen", lambda: CHOSEN)
    monkeypatch.setattr(tuned_arms, "chosen_rate", lambda arm: 3e-4)
    for planned, _ in execute.PARTS.values():
        names = [one.name for one in planned()]
        assert names
        assert len(names) == len(set(names))
    again = replace(START, seed=1)
    (tmp_path / "runs.jsonl").write_text(json.dumps(vars(START)) + "\n")
    assert execute.waiting([START, again, again], tmp_path / "runs.jsonl") == [again]


@pytest.mark.parametrize(
    ("changed", "set_to"),
    [
        ({"algorithm": "rloo"}, {"inner_epochs": 1, "kl_estimator": "k1"}),
        (
            {"algorithm": "grpo", "own_parameter": 0.1},
            {"inner_epochs": 4, "kl_estimator": "k3", "clip_low": 0.1},
        ),
        ({"algorithm": "grpo-k1"}, {"kl_estimator": "k1", "prompts_per_minibatch": 2}),
        ({"algorithm": "rloo-token"}, {"clipping": "token", "inner_epochs": 4}),
        ({"algorithm": "ppo"} | CRITIC, CRITIC),
        ({"algorithm": "rebel", "own_parameter": 3.0}, {"eta": 3.0}),
        (
            {"algorithm": "separate", "own_parameter": 0.5},
            {"clipping": "separate", "clip_range": 0.5},
        ),
        (
            {"algorithm": "ppo", "own_parameter": 0.5},
            {"clip_range": 0.5, "critic_learning_rate": 2e-3},
        ),
        ({"algorithm": "oapl", "own_parameter": 0.3}, {"old_logprobs": "policy", "beta2": 0.3}),
        (
            {"rounds_ahead": 6},
            {"old_logprobs": "policy", "sampler_ratio_cap": 0.0, "rounds_ahead": 6},
        ),
        (
            {"rounds_ahead": 6, "correction": "ratios"},
            {"old_logprobs": "sampler", "sampler_ratio_cap": 0.0},
        ),
        (
            {"rounds_ahead": 6, "correction": "weights"},
            {"old_logprobs": "policy", "sampler_ratio_cap": 10.0},
        ),
        (
            {"rounds_ahead": 6, "correction": "weights", "algorithm": "ppo"},
            {"sampler_ratio_cap": 2.0},
        ),
    ],
)
def test_runs_name_objectives_their_own_parameters_and_corrections(
    task, tmp_path, monkeypatch, changed, set_to
):
    monkeypatch.setitem(one_run.SETTINGS, "inner_epochs", 4)
    monkeypatch.setitem(
        one_run.SETTINGS, "sampler", "engine" if "rounds_ahead" in changed else "transformers"
    )
    run = replace(START, responses_per_prompt=4, **changed)
    config = configuration(run, task, tmp_path)
    assert {name: getattr(config, name) for name in set_to} == set_to
    assert (config.learning_rate, config.kl_coef, config.responses_per_prompt) == (1e-3, 0.03, 4)
    assert all(
        f"{name}={changed[name]}" in run.name
        for name in ("rounds_ahead", "correction")
        if name in changed
    )


def test_corrections_are_those_with_the_most_of_what_training_maximizes(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned_arms, "CHOSEN", tmp_path / "tuned_arms.json")
    liked = {"none": 2.0, "ratios": 1.0, "weights": 1.5}

    def recorded(run: Run) -> dict:
        gain = liked[run.correction] - (run.algorithm == run.correction == "none")
        ends = [
            {"step": step, "kl": 3.0 * step, "reward": step * (gain + 0.3), "missing_eos": 0.0}
            for step in (0, 1)
        ]
        return vars(run) | {"evaluations": ends}

    choice.choose_corrections(to_frames(map(recorded, stale.corrections())))
    found = json.loads((tmp_path / "tuned_arms.json").read_text())["corrections"]
    assert found.pop("none") == "weights"
    assert set(found.values()) == {"none"}
