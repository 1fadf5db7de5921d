"""What runs start from, made of a few examples: what each group has of its own, and what it shares."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from benchmarks.frontier.runs.one_run import train_and_record
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.tasks import starts, synthetic
from benchmarks.frontier.tasks import task as tasks
from benchmarks.frontier.tasks.groups import TASKS, base_of, group_of
from benchmarks.frontier.tasks.task import Task, make, start_of
from fastp3o.models.loading import load_policy

SIZES = {"DEMONSTRATIONS": 64, "TRAIN_PAIRS": 64, "EVAL_PAIRS": 16, "TRAIN_PROMPTS": 16, "EVAL_PROMPTS": 8}
RUN = Run("retuned-0", "joint", 1e-3, 0.1, 0, prompts_per_update=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SIZES.items():
            patch.setattr(synthetic, name, size)
        for stage in (synthetic.SFT, synthetic.REWARD_MODEL):
            patch.setitem(stage, "warmup_steps", 1)
        yield tmp_path_factory.mktemp("tasks")


@pytest.fixture(scope="module")
def base(folder: Path) -> Task:
    return make("retuned-0", folder)


def small(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tasks.TASK_SETTINGS[group_of(name)] | {"updates": 1, "eval_at": "1", "inner_epochs": 1}
    monkeypatch.setitem(tasks.TASK_SETTINGS, group_of(name), settings)


def test_a_task_is_made_once(folder, base):
    made = Path(base.policy) / "model.safetensors"
    written = made.stat().st_mtime_ns
    assert replace(make("retuned-0", folder), gold=base.gold) == base
    assert made.stat().st_mtime_ns == written
    assert base_of("wrong_labels_20-1") == base_of("size_6m-1") == TASKS["retuned"][1]


def test_wrong_labels_move_the_reward_model_alone(folder, base):
    wrong = make("wrong_labels_35-0", folder)
    assert (wrong.policy, wrong.prompts, wrong.eval_prompts) == (base.policy, base.prompts, base.eval_prompts)
    assert wrong.reward_model != base.reward_model
    data = [Path(base.prompts).parent, folder / "wrong_labels_35-0"]
    train = [synthetic.read_jsonl(one / "preferences.train.jsonl") for one in data]
    held_out = [synthetic.read_jsonl(one / "preferences.eval.jsonl") for one in data]
    assert train[0] != train[1]
    assert held_out[0] == held_out[1]


def test_a_larger_policy_is_judged_by_the_same_reward_model(folder, base, monkeypatch):
    larger = make("size_1m-0", folder)
    assert (larger.reward_model, larger.prompts) == (base.reward_model, base.prompts)
    assert load_policy(larger.policy).model.num_parameters() > 9e5
    small("size_1m-0", monkeypatch)
    assert len(train_and_record(replace(RUN, task="size_1m-0"), larger, folder / "trained")["evaluations"]) == 2


def test_many_responses_share_a_long_prompt(folder, monkeypatch):
    long = make("long_prompts-0", folder)
    small("long_prompts-0", monkeypatch)
    run = replace(RUN, task="long_prompts-0", responses_per_prompt=16)
    record = train_and_record(run, long, folder / "trained")
    assert record["costs"]["response_tokens"][-1] >= 8 * 16
    assert {"reward", "gold", "kl"} <= record["evaluations"][-1].keys()


def test_many_languages_start_from_committed_models(folder, monkeypatch):
    """On any machine: models, the statistics of rewards, and the prompts of the language."""
    task = make("many_languages-9", folder)
    assert Path(task.policy) == start_of(9) / "policy"
    assert load_policy(task.policy).model.num_parameters() == 100_160
    assert task.reward_std == json.loads((start_of(9) / "rewards.json").read_text())["reward_std"]
    assert len(TASKS["many_languages"]) == len(list(start_of(9).parent.iterdir())) == 10
    small("many_languages-9", monkeypatch)
    run = replace(RUN, task="many_languages-9", rounds_ahead=1, correction="ratios")
    assert len(train_and_record(run, task, folder / "trained")["evaluations"]) == 2


def test_a_start_is_trained_and_kept_in_bf16(folder, monkeypatch):
    monkeypatch.setattr(starts, "start_of", lambda number: folder / "starts" / str(number))
    monkeypatch.setattr(tasks, "start_of", starts.start_of)
    starts.make_start(3, folder / "many_languages-3")
    kept = starts.start_of(3)
    assert {path.name for path in kept.iterdir()} == {"policy", "reward_model", "rewards.json"}
    made = make("many_languages-3", folder)
    assert made.reward_mean == json.loads((kept / "rewards.json").read_text())["reward_mean"]
    with safe_open(kept / "policy" / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118
