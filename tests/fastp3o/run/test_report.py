"""What a run tells while it goes: lines, logs, the tables of trackers and a plot."""

from pathlib import Path

import pytest
from accelerate import Accelerator
from matplotlib.figure import Figure

from fastp3o.run import log
from fastp3o.run import report as reporting
from fastp3o.run.plot import draw_progress
from fastp3o.run.report import Reporter


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


def test_a_plot_that_fails_ends_no_run(tmp_path: Path, monkeypatch, capsys):
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "progress.png"
    log.append(metrics, [{"step": n, "reward": n / 2, "kl": None if n == 2 else 0.5} for n in (1, 2, 3)])
    monkeypatch.setattr(reporting, "draw_progress", draw_progress)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: metrics.joinpath("none").touch())
    Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=1).close()
    assert f"{picture} is not drawn: [Errno 20] Not a directory" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}
