"""A user of the stages reads the run's own lines, and no other libraries' unless something is wrong."""

import sys
from pathlib import Path

import pytest
from accelerate import Accelerator

from fastp3o.run import report as reporting
from fastp3o.run.report import Reporter, prompt_end
from fastp3o.training import reward_model, sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig


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


@pytest.mark.parametrize(("steps", "printed"), [(30, (2, 4, 6, 8, 10)), (10**6, (3, 6, 9))])
def test_a_run_prints_twenty_lines_or_one_a_minute_and_its_last(workplace, monkeypatch, capfd, steps, printed):
    clock = iter(range(0, 10**6, 25))
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(clock))
    reporter = Reporter(Accelerator(cpu=True), workplace, stage="SFT", first_step=0, steps=steps)
    for step in range(1, 11):
        reporter.step(step, {"loss": 0.5 * step}, shown=("loss",))
    assert capfd.readouterr().out.splitlines() == [f"SFT {step}/{steps}: loss {step / 2:.4g}" for step in printed]
    reporter.close()
    assert ("SFT 10/" in capfd.readouterr().out) == (10 not in printed)


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


def test_the_end_of_a_prompt_is_one_line():
    assert prompt_end("one\n\ntwo  three\n") == "one two three"
    assert prompt_end("one\n\ntwo  three\n", characters=7) == "…o three"
