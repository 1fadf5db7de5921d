"""P3O in one file gives the trainer's numbers."""

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastp3o import P3OConfig
from fastp3o.training.loop import train

ONE_FILE = Path(__file__).parents[3] / "scripts" / "examples" / "p3o_in_one_file.py"
SAME = {
    "updates": 3,
    "prompts_per_update": 6,
    "responses_per_prompt": 3,
    "max_response_tokens": 6,
    "inner_epochs": 2,
    "learning_rate": 3e-3,
    "seed": 3,
}
# The trainer's name for the same is in metrics.md.
COMPARED = [
    "reward",
    "loss",
    "kl",
    "ratio_mean",
    "ratio_max",
    "clip_fraction",
    "advantage_mean_abs",
    "grad_norm",
]


def metrics(folder: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("rows_per_pass", [0, 6])
def test_it_gives_the_trainers_numbers(workplace, tiny_model, monkeypatch, rows_per_pass: int):
    names = {"model": tiny_model, "prompts": "prompts.jsonl", "reward": "rewards_for_tests:varied"}
    config = P3OConfig(
        **names,
        **SAME,
        output_dir="trainer",
        sampler="transformers",
        precision="fp32",
        prompts_per_minibatch=SAME["prompts_per_update"],
        rollout_batch_size=SAME["prompts_per_update"],
        report_to="none",
    )
    train(config)
    flags = [f"--{name}={value}" for name, value in (names | SAME).items()]
    monkeypatch.setattr(
        sys,
        "argv",
        [str(ONE_FILE), *flags, f"--rows_per_pass={rows_per_pass}", "--output_dir=file"],
    )
    runpy.run_path(str(ONE_FILE), run_name="__main__")
    for expected, got in zip(metrics("trainer"), metrics("file"), strict=True):
        for name in COMPARED:
            assert got[name] == pytest.approx(expected[name], rel=2e-4, abs=1e-5), (
                got["step"],
                name,
            )
    begun, trained, again = (
        load_file(f"{folder}/model.safetensors")
        for folder in (tiny_model, "trainer/model", "file/model")
    )
    for name, weight in trained.items():
        moved = (weight - begun[name]).abs().max()
        assert moved > 1e-3
        torch.testing.assert_close(again[name], weight, rtol=0, atol=0.05 * moved.item())
