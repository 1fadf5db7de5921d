"""What runs start from, made of a few examples."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks import task as tasks

SIZES = {"DEMONSTRATIONS": 64, "TRAIN_PAIRS": 64, "EVAL_PAIRS": 16, "TRAIN_PROMPTS": 16, "EVAL_PROMPTS": 8}


def test_a_start_is_trained_once_kept_in_bf16_and_told_from_the_recorded_one(tmp_path, monkeypatch, capsys):
    for name, size in SIZES.items():
        monkeypatch.setattr(synthetic, name, size)
    for stage in (synthetic.SFT, synthetic.REWARD_MODEL):
        monkeypatch.setitem(stage, "warmup_steps", 1)
    task = tasks.make("many_languages-3", tmp_path)
    assert "start 3 differs from the recorded one" in capsys.readouterr().out
    weights = Path(task.policy) / "model.safetensors"
    written = weights.stat().st_mtime_ns
    assert replace(tasks.make("many_languages-3", tmp_path), gold=task.gold) == task
    assert weights.stat().st_mtime_ns == written
    with safe_open(weights, "pt") as kept:
        assert {kept.get_tensor(name).dtype for name in kept.keys()} == {torch.bfloat16}  # noqa: SIM118
