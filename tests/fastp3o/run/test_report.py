"""What a run tells while it goes: lines, logs, the tables of trackers and a plot."""

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from accelerate import Accelerator
from matplotlib.figure import Figure
from tensorboard.plugin_util import markdown_to_safe_html

from fastp3o.run import log
from fastp3o.run import plot as progress
from fastp3o.run import report as reporting
from fastp3o.run.log import LoggedGroup, LoggedResponse
from fastp3o.run.plot import draw_progress, running_mean
from fastp3o.run.report import Reporter
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


def test_what_is_not_finite_is_null(tmp_path: Path):
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=3)
    reporter.step(1, {"loss": float("nan"), "ratio_max": float("inf"), "prompts": 3}, shown=())
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(tmp_path / "metrics.jsonl", [{"step": 2}, {"step": 3, "loss": float("nan")}])
    assert [*log.read(tmp_path / "metrics.jsonl")] == [{"step": 1, "loss": None, "ratio_max": None, "prompts": 3}]


def test_trackers_get_a_row_of_each_response_with_its_text_as_it_is(tmp_path: Path):
    text = "a | b **bold** <b>x</b> [c](http://b) &amp; \n\n# one\n- two `code`\x1b[0m | --- |"
    pages: dict[str, str] = {}
    tables: list[tuple[str, int, list[str], list[list[Any]]]] = []
    tensorboard = SimpleNamespace(name="tensorboard", log=lambda values, step: pages.update(values))
    wandb = SimpleNamespace(
        name="wandb", log_table=lambda name, columns, data, step: tables.append((name, step, columns, data))
    )
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="P3O", first_step=0, steps=7)
    reporter.accelerator.trackers = [tensorboard, wandb]
    responses = [
        LoggedResponse(text, [1, 2], 0.5, {"reward/varied": 2.0}, None, finished=True),
        LoggedResponse("cut", [1], -1.0, {"reward/varied": None}, 0.25, finished=False),
    ]
    reporter.rollouts(7, [LoggedGroup(7, text, None, responses)])
    columns = ["prompt", "response", "reward", "reward/varied", "log_ratio", "tokens", "finished"]
    rows = [[text, text, 0.5, 2.0, None, 2, "True"], [text, "cut", -1.0, None, 0.25, 1, "False"]]
    assert tables == [("train/rollouts", 7, columns, rows)]
    page = markdown_to_safe_html(pages["train/rollouts"])
    shown = re.fullmatch(r"<pre><code>(.*)</code></pre>", page, re.DOTALL)
    assert [json.loads(line) for line in html.unescape(shown[1]).splitlines()] == [columns, *rows]
    assert not re.search(r"<(b|a|strong|em|img|script|h1|ul|ol|p)\b", page)


def test_an_online_run_has_its_metrics_and_evaluations(tmp_path: Path, monkeypatch):
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (figures.append(self), save(self, *args, **kw)))
    metrics, evaluations, picture = (tmp_path / name for name in ("metrics.jsonl", "eval.jsonl", "progress.png"))
    assert not draw_progress(metrics, evaluations, picture)  # there is no step
    steps = [{"step": n, "reward": n / 2, "kl": None if n == 2 else 0.5, "clip_fraction": 0.1} for n in range(1, 5)]
    steps.append({"step": 5, "loss": 2.0, "reward": 3.0})
    metrics.write_text("".join(json.dumps(line) + "\n" for line in steps) + '{"step": 6, "rew')
    evaluations.write_text(json.dumps({"step": 0, "reward": -1.0, "gold": 7.0}) + "\n")
    assert draw_progress(metrics, evaluations, picture)
    panels = {
        axes.get_title(): [line.get_xydata() for line in axes.lines] for axes in figures[0].axes if axes.get_visible()
    }
    assert list(panels) == ["reward", "gold reward", "KL to the reference (nats per response)", "clip fraction"]
    rewards, evaluated = panels["reward"]
    assert rewards.tolist() == [[1, 0.5], [2, 1.0], [3, 1.5], [4, 2.0], [5, 3.0]]
    assert evaluated.tolist() == [[0, -1.0]]
    assert panels["gold reward"][0].tolist() == [[0, 7.0]]
    assert panels["KL to the reference (nats per response)"][0][:, 0].tolist() == [1, 3, 4]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("window", [2, 3, 8])
def test_a_running_mean_is_over_the_values_around(window: int):
    values = np.random.default_rng(1).normal(size=20)
    means = running_mean(values, window)
    for place in range(20):
        around = values[max(place - window // 2, 0) : place + (window + 1) // 2]
        assert means[place] == pytest.approx(around.mean())


def test_what_fails_to_be_drawn_ends_no_run(tmp_path: Path, monkeypatch, capsys):
    def full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reporting, "draw_progress", progress.draw_progress)
    monkeypatch.setattr(Figure, "savefig", full)
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=1)
    reporter.step(1, {"loss": 1.0}, shown=())
    reporter.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert f"{tmp_path}/progress.png is not drawn: [Errno 28] No space left on device" in capsys.readouterr().out
