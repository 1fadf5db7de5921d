"""progress.png: the main metrics of a run over its steps, and its evaluations."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fastp3o.files import whole_file
from fastp3o.run.log import read

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes


# The titles of panels, by metric.
ONLINE = {
    "reward": "reward",
    "gold": "gold reward",
    "kl": "KL to the reference (nats per response)",
    "response_length": "response length (tokens)",
    "missing_eos": "share without end-of-sequence",
    "clip_fraction": "clip fraction",
    "entropy": "entropy (nats per token)",
}
SUPERVISED = {
    "loss": "loss",
    "accuracy": "accuracy",
    "margin": "margin of the better response",
    "reward": "reward of sampled responses",
    "kl": "KL to the reference (nats per response)",
    "grad_norm": "gradient norm",
}
MOST_IN_A_ROW = 3  # of a single row
SMOOTHED_FROM, MEANS = 100, 25  # steps from which on there is a running mean; its window is this part of them
STEPS, EVALUATIONS = "#1f77b4", "#d62728"


def draw_progress(metrics: Path, evaluations: Path, path: Path) -> bool:
    """Writes a PNG, complete or not at all. Returns whether there was anything to draw.

    metrics, evaluations: logs of the run; lines that are damaged are left out.
    """
    steps, evaluated = [*read(metrics)], [*read(evaluations)]
    if not steps:
        return False
    is_online = "reward" in steps[-1]
    titles = ONLINE if is_online else SUPERVISED
    panels = {title: (points(steps, metric), points(evaluated, metric)) for metric, title in titles.items()}
    panels = {title: lines for title, lines in panels.items() if any(len(line[0]) for line in lines)}
    draw(panels, path, title=str(path.parent), unit="update" if is_online else "step")
    return True


Line = tuple[np.ndarray, np.ndarray]  # steps and values


def points(lines: Sequence[dict[str, float | None]], metric: str) -> Line:
    """The finite values of a metric."""
    lines = [line for line in lines if line.get(metric) is not None]
    return np.array([line["step"] for line in lines]), np.array([line[metric] for line in lines])


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Means over the `window` values around each one, fewer at the ends."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")


def draw_steps(axes: "Axes", steps: Line, window: int) -> dict[str, "Artist"]:
    """Draws a metric of the steps. Returns what the legend shows of it. window: steps of a running mean; all: none."""
    values = steps[1]
    if not len(values):
        return {}
    # The mean of a constant would show nothing but rounding.
    has_mean = window < len(values) and np.ptp(values) > 1e-6 * np.abs(values).max()
    if not has_mean:
        (line,) = axes.plot(*steps, "." if len(values) == 1 else "-", color=STEPS, linewidth=1.2)
        return {} if window < len(values) else {"training": line}
    axes.plot(*steps, color=STEPS, alpha=0.3, linewidth=1)
    (line,) = axes.plot(steps[0], running_mean(values, window), color=STEPS, linewidth=1.8)
    return {f"training, and its mean over {window} steps": line}


def draw(panels: Mapping[str, tuple[Line, Line]], path: Path, *, title: str, unit: str) -> None:
    # These take half a second, for which the start of a run does not wait.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = 1 if len(panels) <= MOST_IN_A_ROW else 2
    columns = -(-len(panels) // rows)
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.6), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False, sharex=True).flatten()
    count = max(len(steps) for (steps, _), _ in panels.values())
    window = count // MEANS if count >= SMOOTHED_FROM else count
    handles: dict[str, Artist] = {}
    for axes, (name, (steps, evaluated)) in zip(all_axes, panels.items(), strict=False):
        handles |= draw_steps(axes, steps, window)
        if len(evaluated[0]):
            (handles["evaluation"],) = axes.plot(*evaluated, "o", color=EVALUATIONS, markersize=4.5)
        axes.set_title(name, fontsize=10)
        axes.tick_params(labelsize=8, labelbottom=True)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    for axes in all_axes[max(len(panels) - columns, 0) : len(panels)]:
        axes.set_xlabel(unit, fontsize=9)
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9)
    with whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
