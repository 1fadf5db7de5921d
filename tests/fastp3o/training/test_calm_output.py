"""A user of the stages reads the run's own lines, and no other libraries' unless something is wrong."""

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate import Accelerator

from fastp3o.models.loading import load_reward_model
from fastp3o.run import report as reporting
from fastp3o.run.report import Reporter, prompt_end
from fastp3o.training import reward_model, sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig


@pytest.fixture
def transformers_log() -> Iterator[list[str]]:
    """The records of transformers' logger of loading, which does not propagate to the one that pytest reads."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.addFilter(lambda record: messages.append(record.getMessage()))
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_stages_print_their_own_lines_alone(workplace: Path, tiny_model: str, capfd):
    common = {"report_to": "none", "batch_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 16}
    sft.train(
        SFTConfig(model=tiny_model, train_data="sft.jsonl", eval_data="sft.jsonl", output_dir="runs/sft", **common)
    )
    data = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    reward_model.train(RewardModelConfig(model="runs/sft/model", output_dir="runs/rm", **data, **common))
    out, err = capfd.readouterr()
    assert err == ""
    assert [line.split(":")[0] for line in out.splitlines()] == [
        *("sft.jsonl", "sft.jsonl", "after step 0", "SFT 1/2", "SFT 2/2", "after step 2", "progress", "model"),
        *("preferences.jsonl", "preferences.jsonl", "after step 0", "reward model 1/2", "reward model 2/2"),
        *("after step 2", "progress", "model"),
    ]
    assert out.endswith("\nmodel: runs/rm/model\n")


def test_a_run_without_evaluations_ends_with_its_loss_and_its_model(workplace: Path, tiny_model: str, capfd):
    settings = {"report_to": "none", "batch_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 16}
    sft.train(SFTConfig(model=tiny_model, train_data="sft.jsonl", output_dir="run", epochs=15, **settings))
    out = capfd.readouterr().out.splitlines()
    losses = [json.loads(line)["loss"] for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 30
    printed = [line for line in out if line.startswith("SFT ")]
    # Every second one: about 20 lines at most.
    assert printed == [f"SFT {step}/30: loss {losses[step - 1]:.4g}" for step in range(2, 31, 2)]
    assert out[-3:] == [printed[-1], "progress: run/progress.png", "model: run/model"]


def test_a_run_of_many_steps_prints_a_line_a_minute_and_its_last(workplace: Path, monkeypatch, capfd):
    clock = iter(range(0, 10**6, 25))
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(clock))
    reporter = Reporter(Accelerator(cpu=True), workplace, stage="SFT", first_step=0, steps=10**6)
    for step in range(1, 11):
        reporter.step(step, {"loss": 0.5 * step}, shown=("loss",))
    assert [line.split(":")[0] for line in capfd.readouterr().out.splitlines()] == [
        f"SFT {step}/1000000" for step in (3, 6, 9)
    ]
    reporter.close()
    assert capfd.readouterr().out.splitlines()[0] == "SFT 10/1000000: loss 5"


def test_a_terminal_has_a_bar_and_the_last_step(workplace: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    reporter = Reporter(Accelerator(cpu=True), workplace, stage="SFT", first_step=0, steps=3)
    for step in (1, 2, 3):
        reporter.step(step, {"loss": 1.0 / step}, shown=("loss",))
    assert capsys.readouterr().out == ""
    reporter.close()
    assert [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()] == [
        "SFT 3/3: loss 0.3333",
        f"progress: {workplace}/progress.png",
    ]


def test_the_missing_head_of_a_new_reward_model_goes_without_saying(tiny_model: str, transformers_log: list[str]):
    load_reward_model(tiny_model, new_head=True)
    assert transformers_log == []


def test_the_end_of_a_prompt_is_one_line():
    assert prompt_end("one\n\ntwo  three\n") == "one two three"
    assert prompt_end("one\n\ntwo  three\n", characters=7) == "…o three"
