"""What the figures have in common: colours, names, curves over seeds, and the layout of panels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.records import Arm, Record, Study, enough
from fastp3o.evaluation.matched_kl import gains

# In the order of plan.ALGORITHMS; what P3O's clippings share, joint shows.
LOOKS = {
    "joint": {"color": "#0072B2", "marker": "o", "zorder": 4},
    "separate": {"color": "#56B4E9", "marker": "s", "zorder": 3},
    "none": {"color": "#8C8C8C", "marker": "^", "zorder": 2},
    "ppo": {"color": "#D55E00", "marker": "D", "zorder": 3},
    "dpo": {"color": "#009E73", "marker": "v", "zorder": 3},
}
NAMES = {
    "joint": "P3O, joint",
    "separate": "P3O, separate",
    "none": "P3O, no clipping",
    "ppo": "PPO",
    "dpo": "DPO",
    "sft": "SFT",
}
KL = "KL to the reference, nats per response"


def gain_label(outcome: str) -> str:
    return f"gain, {outcome}, standard deviations" if outcome == "proxy" else f"gain, {outcome} utility"


def drawn(study: Study, group: str, arm: Arm) -> list[Record]:
    """The runs of an arm, if there are enough for a mean to be one of the arm."""
    runs = study.runs_of(group, arm)
    return runs if enough(len(runs)) else []


def shared_updates(runs: list[Record]) -> list[float]:
    """The updates after which all of them were evaluated."""
    return sorted(set.intersection(*({evaluation["step"] for evaluation in run["evaluations"]} for run in runs)))


def curves(runs: list[Record], of: str) -> np.ndarray:
    """KL and gain of each run at their shared updates, [runs, updates, 2]."""
    steps = shared_updates(runs)
    return np.array(
        [[(e["kl"], e["reward"]) for e in gains(run["evaluations"], of) if e["step"] in steps] for run in runs]
    )


def draw_curves(axes: Axes, runs: list[Record], of: str, label: str, **look: Any) -> None:
    """Mean KL and gain over seeds at each update, with a thin line for every seed."""
    draw_mean(axes, curves(runs, of), label, **look)


def draw_mean(axes: Axes, points: np.ndarray, label: str, **look: Any) -> None:
    """Of curves [runs, updates, 2], each thin, and their mean with a marker an update."""
    for run in points:
        axes.plot(*run.T, color=look["color"], linewidth=0.5, alpha=0.3)
    axes.plot(*points.mean(axis=0).T, **look, markersize=4, linewidth=1.5, label=label)


def bars(estimates: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """How far intervals (mean, low, high) reach below and above, [2, estimates]; infinite ones are not drawn."""
    means, lows, highs = np.array(estimates).T
    return np.where(np.isfinite(lows), [means - lows, highs - means], np.nan)


def finish(figure: Figure, panels: Sequence[Axes], title: str, path: Path) -> None:
    """A legend of everything that any panel shows, below them, and the PNG."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, wrap=True)
    columns = min(len(handles), int(figure.get_figwidth() // 1.7))
    place = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **place)
    figure.savefig(path, dpi=150)
