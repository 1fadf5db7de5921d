"""What a run tells while it goes: lines, logs, the tables of trackers and a plot."""

import html
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from matplotlib.figure import Figure
from tensorboard.plugin_util import markdown_to_safe_html

from fastp3o.run import log
from fastp3o.run import report as reporting
from fastp3o.run.log import LoggedGroup, LoggedResponse
from fastp3o.run.plot import draw_progress
from fastp3o.run.report import Reporter
from fastp3o.training import reward_model, sft
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig


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


def test_stages_print_their_own_lines_alone(workplace: Path, tiny_model: str, capfd):
    common = {"report_to": "none", "batch_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 16}
    sft.train(SFTConfig(model=tiny_model, train_data="sft.jsonl", output_dir="sft", **common))
    data = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    reward_model.train(RewardModelConfig(model="sft/model", output_dir="rm", **data, **common))
    out, err = capfd.readouterr()
    assert err == ""
    assert [line.split(":")[0] for line in out.splitlines()] == [
        *("sft.jsonl", "SFT 1/2", "SFT 2/2", "progress", "model", "preferences.jsonl", "preferences.jsonl"),
        *("after step 0", "reward model 1/2", "reward model 2/2", "after step 2", "progress", "model"),
    ]


def test_trackers_get_a_row_of_each_response_with_its_text_as_it_is(tmp_path: Path):
    text = "a | b **bold** <b>x</b> [c](http://b) &amp; \n\n# one\n- two `code`\x1b[0m | --- |"
    told: list = []
    tensorboard = SimpleNamespace(name="tensorboard", log=lambda values, step: told.extend(values.values()))
    wandb = SimpleNamespace(name="wandb", log_table=lambda name, columns, data, step: told.append([columns, *data]))
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="P3O", first_step=0, steps=7)
    reporter.accelerator.trackers = [tensorboard, wandb]
    responses = [LoggedResponse(text, [1, 2], 0.5, {"reward/varied": None}, 0.25, finished=True)]
    reporter.rollouts(7, [LoggedGroup(7, text, None, responses)])
    page, table = told
    columns = ["prompt", "response", "reward", "reward/varied", "log_ratio", "tokens", "finished"]
    assert table == [columns, [text, text, 0.5, None, 0.25, 2, "True"]]
    shown = re.fullmatch(r"<pre><code>(.*)</code></pre>", markdown_to_safe_html(page), re.DOTALL)
    assert [json.loads(line) for line in html.unescape(shown[1]).splitlines()] == table


def test_a_plot_has_metrics_and_evaluations_and_one_that_fails_ends_no_run(tmp_path: Path, monkeypatch, capsys):
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    metrics, evaluations, picture = (tmp_path / name for name in ("metrics.jsonl", "eval.jsonl", "progress.png"))
    log.append(metrics, [{"step": n, "reward": n / 2, "kl": None if n == 2 else 0.5} for n in (1, 2, 3)])
    log.append(evaluations, [{"step": 0, "reward": -1.0}])
    assert draw_progress(metrics, evaluations, picture)
    reward, kl = ([line.get_xydata().tolist() for line in axes.lines] for axes in drawn[0].axes[:2])
    assert reward == [[[1, 0.5], [2, 1.0], [3, 1.5]], [[0, -1.0]]]
    assert kl == [[[1, 0.5], [3, 0.5]]]
    picture.unlink()
    monkeypatch.setattr(reporting, "draw_progress", draw_progress)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: metrics.joinpath("none").touch())
    Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=1).close()
    assert f"{picture} is not drawn: [Errno 20] Not a directory" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl", "eval.jsonl"}
