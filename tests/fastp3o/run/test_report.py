"""What a run tells while it goes: lines, logs, the tables of trackers and a plot."""

import fcntl
import os
import pty
import struct
import sys
import termios
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from matplotlib.figure import Figure

from fastp3o.run import log
from fastp3o.run import report as reporting
from fastp3o.run.plot import draw_progress
from fastp3o.run.report import Reporter


@pytest.mark.parametrize(("steps", "printed"), [(30, (2, 4, 6, 8, 10)), (10**6, (3, 6, 9))])
def test_a_run_prints_twenty_lines_or_one_a_minute_and_its_last(
    workplace, monkeypatch, capfd, steps, printed
):
    clock = iter(range(0, 10**6, 25))
    monkeypatch.setattr(reporting.time, "monotonic", lambda: next(clock))
    reporter = Reporter(Accelerator(cpu=True), workplace, stage="SFT", first_step=0, steps=steps)
    for step in range(1, 11):
        reporter.step(step, {"loss": 0.5 * step}, shown=("loss",))
    assert capfd.readouterr().out.splitlines() == [
        f"SFT {step}/{steps}: loss {step / 2:.4g}" for step in printed
    ]
    reporter.close()
    assert ("SFT 10/" in capfd.readouterr().out) == (10 not in printed)


def test_what_is_not_finite_is_null(tmp_path: Path):
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=3)
    reporter.step(1, {"loss": float("nan"), "ratio_max": float("inf"), "prompts": 3}, shown=())
    with pytest.raises(ValueError, match="not JSON compliant"):
        log.append(tmp_path / "metrics.jsonl", [{"step": 2}, {"step": 3, "loss": float("nan")}])
    assert [*log.read(tmp_path / "metrics.jsonl")] == [
        {"step": 1, "loss": None, "ratio_max": None, "prompts": 3}
    ]


def test_a_plot_that_fails_ends_no_run(tmp_path: Path, monkeypatch, capsys):
    metrics, picture = tmp_path / "metrics.jsonl", tmp_path / "progress.png"
    log.append(
        metrics, [{"step": n, "reward": n / 2, "kl": None if n == 2 else 0.5} for n in (1, 2, 3)]
    )
    monkeypatch.setattr(reporting, "draw_progress", draw_progress)
    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: metrics.joinpath("none").touch())
    Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=1).close()
    assert f"{picture} is not drawn: [Errno 20] Not a directory" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_the_plot_is_drawn_at_evaluations_as_far_as_it_takes_little_of_the_time(
    tmp_path: Path, monkeypatch, capsys
):
    now, drawn = [0.0], []

    def draw(metrics, evaluations, path):
        drawn.append(now[0])
        now[0] += 1.0
        raise OSError("no space")

    monkeypatch.setattr(reporting.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(reporting, "draw_progress", draw)
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=9)
    for step, time in [(0, 10), (1, 20), (2, 60), (3, 80), (4, 200)]:
        now[0] = time
        reporter.evaluation(step, {"loss": 1.0})
    assert drawn == [20, 80, 200], (
        "not before the first step, and not again within 50 times what it took"
    )
    assert "not drawn" not in capsys.readouterr().out
    reporter.close()
    assert "is not drawn: no space" in capsys.readouterr().out


@pytest.fixture
def terminal():
    """A function of a number of columns that gives a terminal of this width, as a stream."""
    opened = []

    def make(columns: int):
        own, other = pty.openpty()
        fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 0, columns, 0, 0))
        opened.extend([own, stream := os.fdopen(other, "w")])
        return stream

    yield make
    for one in opened:
        os.close(one) if isinstance(one, int) else one.close()


@pytest.mark.parametrize(("columns", "lines"), [(0, True), (40, False)])
def test_a_terminal_without_columns_has_lines_in_the_place_of_a_bar(
    tmp_path: Path, monkeypatch, terminal, columns, lines
):
    monkeypatch.setattr(sys, "stderr", terminal(columns))
    reporter = Reporter(Accelerator(cpu=True), tmp_path, stage="SFT", first_step=0, steps=2)
    assert bool(reporter.bar.disable) is lines
    reporter.bar.close()


def test_an_evaluation_is_broken_between_metrics_on_a_terminal_alone(monkeypatch, terminal):
    line = "after step 20: reward -28.8 ± 16.35, kl 0.3811 ± 0.7386, prompts 30"
    monkeypatch.setattr(sys, "stdout", terminal(40))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    broken = reporting.within_terminal(line)
    monkeypatch.undo()
    assert broken.split("\n") == [
        "after step 20: reward -28.8 ± 16.35,",
        "    kl 0.3811 ± 0.7386, prompts 30",
    ]
    assert reporting.within_terminal(line) == line


def test_trackers_get_a_table_of_rollouts(tmp_path: Path, monkeypatch):
    got = {}

    def tracker(name):
        keep = lambda values, step, **_: got.setdefault(name, (values, step))  # noqa: E731
        table = lambda key, columns, data, step: keep({key: (columns, data)}, step)  # noqa: E731
        return SimpleNamespace(name=name, log=keep, log_table=table)

    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(Table=lambda dataframe: dataframe))
    accelerator = Accelerator(cpu=True)
    accelerator.trackers = [tracker(name) for name in ("tensorboard", "wandb", "trackio", "mlflow")]
    reporter = Reporter(accelerator, tmp_path, stage="P3O", first_step=0, steps=3)
    response = log.LoggedResponse("yes", [1, 2], 0.5, {"reward/a": 0.5}, None, True)
    reporter.rollouts(3, [log.LoggedGroup(3, "why?", None, [response])])
    columns, row = (
        ["prompt", "response", "reward", "reward/a", "log_ratio", "tokens", "finished"],
        ["why?", "yes", 0.5],
    )
    row += [0.5, None, 2, "True"]
    assert got["wandb"] == ({"train/rollouts": (columns, [row])}, 3)
    values, step = got["trackio"]
    assert (
        values["train/rollouts"].columns.tolist(),
        values["train/rollouts"].values.tolist(),
    ) == (columns, [row])
    assert step == 3
    assert '"why?", "yes"' in got["tensorboard"][0]["train/rollouts"]
    assert "mlflow" not in got
