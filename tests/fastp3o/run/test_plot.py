import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from fastp3o.run import plot as progress
from fastp3o.run import report as reporting
from fastp3o.run.plot import draw_progress, running_mean
from fastp3o.training import sft
from fastp3o.training.sft import SFTConfig


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are saved."""
    found: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *args, **kw: (found.append(self), save(self, *args, **kw)))
    return found


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def drawn(figure: Figure) -> dict[str, list[np.ndarray]]:
    """The lines of each panel, by its title."""
    return {axes.get_title(): [line.get_xydata() for line in axes.lines] for axes in figure.axes if axes.get_visible()}


def test_an_online_run_has_its_metrics_and_evaluations(tmp_path: Path, figures: list[Figure]):
    steps = [{"step": n, "reward": n / 2, "kl": None if n == 2 else 0.5, "clip_fraction": 0.1} for n in range(1, 5)]
    metrics = write(tmp_path / "metrics.jsonl", [*steps, {"step": 5, "loss": 2.0, "reward": 3.0}])
    with metrics.open("a") as file:
        file.write('{"step": 6, "rew')
    evaluations = write(tmp_path / "eval.jsonl", [{"step": 0, "reward": -1.0, "gold": 7.0}])
    assert draw_progress(metrics, evaluations, tmp_path / "progress.png")
    panels = drawn(figures[0])
    assert list(panels) == ["reward", "gold reward", "KL to the reference (nats per response)", "clip fraction"]
    rewards, evaluated = panels["reward"]
    assert rewards.tolist() == [[1, 0.5], [2, 1.0], [3, 1.5], [4, 2.0], [5, 3.0]]
    assert evaluated.tolist() == [[0, -1.0]]
    assert panels["gold reward"][0].tolist() == [[0, 7.0]]
    assert panels["KL to the reference (nats per response)"][0][:, 0].tolist() == [1, 3, 4]
    height, width, _ = imread(tmp_path / "progress.png").shape
    assert height > 400
    assert width > 1000
    assert len(list(tmp_path.iterdir())) == 3


def test_many_steps_have_a_running_mean_beside_them(tmp_path: Path, figures: list[Figure]):
    losses = np.random.default_rng(0).normal(size=200)
    lines = [{"step": n, "loss": loss, "grad_norm": 0.1} for n, loss in enumerate(losses, 1)]
    draw_progress(write(tmp_path / "metrics.jsonl", lines), tmp_path / "eval.jsonl", tmp_path / "progress.png")
    panels = drawn(figures[0])
    raw, mean = panels["loss"]
    assert raw[:, 1].tolist() == losses.tolist()
    # Steps 97 to 104, around step 101.
    assert mean[100, 1] == pytest.approx(losses[96:104].mean())
    assert len(panels["gradient norm"]) == 1  # which does not change


@pytest.mark.parametrize("window", [2, 3, 8])
def test_a_running_mean_is_over_the_values_around(window: int):
    values = np.random.default_rng(1).normal(size=20)
    means = running_mean(values, window)
    for place in range(20):
        around = values[max(place - window // 2, 0) : place + (window + 1) // 2]
        assert means[place] == pytest.approx(around.mean())


def test_a_run_without_steps_has_no_plot(tmp_path: Path):
    assert not draw_progress(tmp_path / "metrics.jsonl", tmp_path / "eval.jsonl", tmp_path / "progress.png")
    assert not list(tmp_path.iterdir())


def test_what_fails_to_be_drawn_ends_no_run(workplace: Path, tiny_model: str, monkeypatch, capsys):
    def full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reporting, "draw_progress", progress.draw_progress)
    settings = {"report_to": "none", "batch_size": 4, "max_prompt_tokens": 32, "max_response_tokens": 16}
    settings |= {"model": tiny_model, "train_data": "sft.jsonl"}
    sft.train(SFTConfig(output_dir="drawn", **settings))
    monkeypatch.setattr(Figure, "savefig", full)
    sft.train(SFTConfig(output_dir="full", **settings))
    assert Path("drawn/progress.png").read_bytes()[:4] == b"\x89PNG"
    assert not [path.name for path in Path("full").iterdir() if "progress" in path.name]
    out = capsys.readouterr().out
    assert "progress: drawn/progress.png\nmodel: drawn/model\n" in out
    assert "full/progress.png is not drawn: [Errno 28] No space left on device" in out
    assert out.endswith("\nmodel: full/model\n")
