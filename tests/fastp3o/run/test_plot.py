import json
from pathlib import Path

import numpy as np
import pytest
from accelerate import Accelerator
from matplotlib.figure import Figure

from fastp3o.run import plot as progress
from fastp3o.run import report as reporting
from fastp3o.run.plot import draw_progress, running_mean
from fastp3o.run.report import Reporter


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
