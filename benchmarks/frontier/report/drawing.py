"""What the figures have in common: colours, names, curves over seeds, and the layout of panels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.frontier.report.study import Arm, Study, enough

# In the order of plan.EVERYONE; what P3O's clippings share, joint shows.
LOOKS = {
    "joint": {"color": "#0072B2", "marker": "o", "zorder": 4},
    "separate": {"color": "#56B4E9", "marker": "s", "zorder": 3},
    "none": {"color": "#8C8C8C", "marker": "^", "zorder": 2},
    "ppo": {"color": "#D55E00", "marker": "D", "zorder": 3},
    "dpo": {"color": "#009E73", "marker": "v", "zorder": 3},
    "rloo": {"color": "#CC79A7", "marker": "P", "zorder": 3},
    "grpo": {"color": "#E69F00", "marker": "X", "zorder": 3},
    "dr_grpo": {"color": "#A6761D", "marker": "<", "zorder": 3},
    "dapo": {"color": "#7B3294", "marker": ">", "zorder": 3},
    "gspo": {"color": "#B2182B", "marker": "h", "zorder": 3},
    "rebel": {"color": "#1B7837", "marker": "*", "zorder": 3},
    "joint_once": {"color": "#08306B", "marker": "d", "zorder": 3},
    "ppo_narrow": {"color": "#7F2704", "marker": "p", "zorder": 3},
}
NAMES = {
    "joint": "P3O, joint",
    "separate": "P3O, separate",
    "none": "P3O, no clipping",
    "ppo": "PPO",
    "dpo": "DPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rebel": "REBEL",
    "joint_once": "P3O, joint, one pass",
    "ppo_narrow": "PPO, ε 0.1",
    "joint-difference": "P3O, joint, scaled",
    "sft": "SFT",
}
KL = "KL to the reference, nats per response"


def gain_label(name: str) -> str:
    return f"gain, {name}, standard deviations" if name == "proxy" else f"gain, {name} utility"


def enough_runs(study: Study, group: str, arm: Arm) -> DataFrame | None:
    """The runs of an arm, if there are enough for a mean to be one of the arm."""
    runs = study.runs_of(group, arm)
    return runs if enough(len(runs)) else None


def curves(study: Study, runs: DataFrame, column: str) -> DataFrame:
    """A column of the evaluations: a line a run, a column an update after which all of them were evaluated."""
    values = study.evaluations_of(runs)[column].unstack("step")
    return values.loc[runs["name"]].dropna(axis="columns")


def draw_gains(axes: Axes, study: Study, runs: DataFrame, outcome: str, label: str, **look: Any) -> None:
    """Gain over KL, as `draw_mean` draws it."""
    draw_mean(axes, curves(study, runs, "kl"), curves(study, runs, f"{outcome}_gain"), label, **look)


def draw_mean(axes: Axes, x: DataFrame, y: DataFrame, label: str, **look: Any) -> None:
    """A thin line for every run, and the mean over runs with a marker an update."""
    axes.plot(x.T, y.T, color=look["color"], linewidth=0.5, alpha=0.3)
    axes.plot(x.mean(), y.mean(), **look, markersize=4, linewidth=1.5, label=label)


def bars(estimates: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """How far intervals (mean, low, high) reach below and above, [2, estimates]; infinite ones are not drawn."""
    means, lows, highs = np.array(estimates).T
    return np.where(np.isfinite(lows), [means - lows, highs - means], np.nan)


def finish(figure: Figure, panels: Sequence[Axes], title: str, path: Path) -> None:
    """A legend of everything that any panel names, below them, and the PNG."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, wrap=True)
    if handles:
        columns = min(len(handles), int(figure.get_figwidth() // 1.7))
        place = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
        figure.legend(handles.values(), handles.keys(), **place)
    figure.savefig(path, dpi=150)
