"""progress.png: the main metrics of a run over its steps, and its evaluations."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from fastp3o.files import whole_file
from fastp3o.run.log import read

if TYPE_CHECKING:
    from matplotlib.artist import Artist

# The titles of panels, by metric.
ONLINE = {
    "reward": "reward",
    "gold": "gold reward",
    "win_rate": "win rate against the rival",
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
    "win_rate": "win rate against the rival",
    "kl": "KL to the reference (nats per response)",
    "grad_norm": "gradient norm",
}
PART = "reward/"  # begins the names of a reward's parts
MOST_IN_A_ROW, MOST_IN_ROWS = 3, 4  # panels of a single row, and of each of several
# Steps from which on there is a running mean; its window is this part of them.
SMOOTHED_FROM, MEANS = (
    100,
    25,
)
STEPS, EVALUATIONS = "#1f77b4", "#d62728"


def panels(steps: Collection[str], evaluated: Collection[str]) -> tuple[dict[str, str], str]:
    """The panels of metrics that steps and evaluations have logged: their titles, and the unit of
    steps. An online run has one for each part of its reward, too.
    """
    logged = {*steps, *evaluated}
    if "reward" not in steps:
        return {metric: title for metric, title in SUPERVISED.items() if metric in logged}, "step"
    parts = sorted(name for name in logged if name.startswith(PART) and not name.endswith("_std"))
    titles = ONLINE | {name: f"reward: {name.removeprefix(PART)}" for name in parts}
    return {metric: title for metric, title in titles.items() if metric in logged}, "update"


def draw_progress(metrics: Path, evaluations: Path, path: Path) -> bool:
    """Writes a PNG, complete or not at all. Returns whether there was anything to draw. metrics,
    evaluations: logs of the run; lines that are damaged are left out.
    """
    # These take half a second, for which the start of a run does not wait.
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, evaluated = (
        pd.DataFrame([*read(log)]).dropna(axis="columns", how="all")
        for log in (metrics, evaluations)
    )
    if steps.empty:
        return False
    titles, unit = panels(steps.columns, evaluated.columns)
    shown = list(titles)
    rows = 1 if len(shown) <= MOST_IN_A_ROW else max(2, -(-len(shown) // MOST_IN_ROWS))
    columns = -(-len(shown) // rows)
    figure = Figure(figsize=(4.2 * columns, 2.7 * rows + 0.6), layout="constrained")
    window = len(steps) // MEANS if len(steps) >= SMOOTHED_FROM else 0
    handles: dict[str, Artist] = {}
    for place, metric in enumerate(shown, 1):
        axes = figure.add_subplot(
            rows, columns, place, sharex=figure.axes[0] if figure.axes else None
        )
        if metric in steps:
            values = steps.set_index("step")[metric].dropna()
            # The mean of a constant would show nothing but rounding.
            smooth = window and values.max() - values.min() > 1e-6 * values.abs().max()
            if smooth:
                axes.plot(values, color=STEPS, alpha=0.3, linewidth=1)
                values = values.rolling(window, center=True, min_periods=1).mean()
            marker = "." if len(values) == 1 else ""
            label = f"training, and its mean over {window} steps" if window else "training"
            (handles[label],) = axes.plot(
                values, color=STEPS, marker=marker, linewidth=1.8 if smooth else 1.2
            )
        if metric in evaluated:
            values = evaluated.set_index("step")[metric].dropna()
            (handles["evaluation"],) = axes.plot(values, "o", color=EVALUATIONS, markersize=4.5)
        axes.set_title(titles[metric], fontsize=10)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
        if place > len(shown) - columns:
            axes.set_xlabel(unit, fontsize=9)
    figure.suptitle(str(path.parent), fontsize=11, parse_math=False)
    figure.legend(
        handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=9
    )
    with whole_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
    return True
