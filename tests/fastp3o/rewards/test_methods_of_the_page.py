"""The page's methods by comparisons run as they stand there, on tiny models."""

import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from fastp3o.__main__ import main
from fastp3o.training import reward_model
from fastp3o.training.config import RewardModelConfig
from tests.fastp3o.letters import save_letters

PAGE = (Path(__file__).parents[3] / "fastp3o" / "rewards" / "README.md").read_text()
SECTION = PAGE.partition("### Methods by comparisons\n")[2].partition("\n## ")[0]
METHODS = re.findall(r"^\| (.+?) \| `(fastp3o .+)` \|$", SECTION, re.MULTILINE)
# What makes a run small, by its command.
ALL = "--max_response_tokens 4 --max_prompt_tokens 16 --precision fp32"
ONLINE = f"{ALL} --updates 1 --prompts_per_update 2 --prompts_per_minibatch 2 --responses_per_prompt 2 --report_to none"
SMALL = {
    "online": ONLINE,
    "generate": f"{ALL} --limit 2 --responses_per_prompt 4 --keep_unfinished True",
    "preference": f"{ALL} --epochs 1 --batch_size 1 --report_to none",
}
RULES = """
def better(prompts, firsts, seconds):
    return [1.0 if "e" in a and "e" not in b else 0.0 if "e" in b and "e" not in a else None
            for a, b in zip(firsts, seconds)]
"""


def test_the_table_has_the_methods():
    assert [re.sub(r"[ (,].*", "", name) for name, _ in METHODS] == [
        "SLiC-HF",
        "its",
        "RSO",
        "Nash-MD",
        "IPO-MD",
        "direct",
        "rules",
    ]
    assert len(METHODS) == SECTION.count("\n| ") - 1  # each row but the heading


@pytest.fixture
def models(workplace, tiny_model, tokenizer) -> None:
    """What the commands name."""
    Path("rules.py").write_text(RULES)
    for name in ("sft", "judge"):
        save_letters(tiny_model, tokenizer, Path("runs", name, "model"))
    settings = {
        "train_data": "preferences.jsonl",
        "batch_size": 8,
        "preference_dim": 2,
        "report_to": "none",
    }
    limits = {"max_prompt_tokens": 16, "max_response_tokens": 8, "precision": "fp32"}
    reward_model.train(
        RewardModelConfig(model=tiny_model, output_dir="runs/pm", **settings, **limits)
    )


def run(monkeypatch: pytest.MonkeyPatch, command: str) -> str:
    """Runs one command of the page, small. Returns the folder that it writes."""
    _, stage, *flags = shlex.split(command)
    small = [*SMALL[stage].split(), *(["--accept", "2"] if "--accept" in flags else [])]
    monkeypatch.setattr(sys, "argv", ["fastp3o", stage, *flags, *small])
    monkeypatch.setattr("gc.freeze", lambda: None)  # this process lives on
    main()
    return flags[flags.index("--output_dir") + 1]


@pytest.mark.parametrize(
    "command", [command for _, command in METHODS], ids=lambda command: command.split("/")[-1]
)
def test_it_runs_by_its_command_and_compares(models, monkeypatch, command):
    for single in command.split(" && "):
        folder = Path(run(monkeypatch, single))
        if " generate " in single:
            samples, kept = (
                [json.loads(line) for line in (folder / file).read_text().splitlines()]
                for file in ("samples.jsonl", "kept.jsonl")
            )
            assert kept
            assert all(len(line["rewards"]) == 4 for line in samples)
            continue
        (metrics,) = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ][-1:]
        assert (folder / "model").is_dir()
        if "judge" in single:
            assert metrics["reward_answered"] == 1
        if "else" in single:
            assert 0 <= metrics["reward/better_answered"] <= 1
            assert metrics["reward/better_answered"] + metrics[
                "reward/judge_answered"
            ] == pytest.approx(1)
        if "--objective nash_md" in single:
            assert 0 < metrics["preferred"] < 1
