"""What the figures share: colours, names, curves over seeds, and the layout of panels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.frontier.report.study import Arm, Study, enough
from benchmarks.frontier.runs.records import by_task
from fastp3o.evaluation.matched_kl import interval

# In the order of plan.EVERYONE; later entries are drawn over earlier ones only where zorder says so.
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
    "ppo_centred": {"color": "#F4A582", "marker": "D", "zorder": 3},
    "joint-group": {"color": "#003C30", "marker": "x", "zorder": 3},
    "joint-difference": {"color": "#5E4FA2", "marker": "x", "zorder": 3},
}
NAMES = {
    "joint": "P3O, joint",
    "separate": "P3O, separate",
    "none": "P3O, no clipping",
    "ppo": "PPO",
    "dpo": "online DPO",
    "rloo": "RLOO",
    "grpo": "GRPO",
    "dr_grpo": "Dr. GRPO",
    "dapo": "DAPO",
    "gspo": "GSPO",
    "rebel": "REBEL",
    "joint_once": "P3O, joint, one pass",
    "ppo_narrow": "PPO, ε 0.1",
    "ppo_centred": "PPO less the prompt's mean",
    "joint-group": "P3O, groups scaled",
    "joint-difference": "P3O, rewards scaled",
    "sft": "the start",
}
KL = "KL to the start, nats per response"


def gain_label(name: str) -> str:
    return f"gain in the {'learned reward (proxy)' if name == 'proxy' else 'true utility (gold)'}, std"


def enough_runs(study: Study, group: str, arm: Arm) -> DataFrame | None:
    """The runs of an arm, None if they are too few for a mean that speaks for the arm."""
    runs = study.runs_of(group, arm)
    return runs if enough(len(runs)) else None


def curves(study: Study, runs: DataFrame, column: str) -> DataFrame:
    """A column of the evaluations: one row per run, one column per update after which every run was evaluated."""
    values = study.evaluations_of(runs)[column].unstack("step")
    return values.loc[runs["name"]].dropna(axis="columns")


def draw_at_kls(
    axes: Axes, study: Study, runs: DataFrame, outcome: str, kls: np.ndarray, *, band: bool = True, **look: Any
) -> None:
    """The mean gain at equal KL, with the band of its 95% interval, at the KLs that enough of the runs reach."""
    points = []
    for kl in kls:
        gains = study.records.at_kl(runs, kl, outcome)
        if enough(gains.count()):
            points.append((kl, *interval(by_task(gains))[:3]))
    if not points:
        return
    x, mean, low, high = np.array(points).T
    axes.plot(x, mean, **({"linewidth": 1.8} | look))
    if band and np.isfinite(low).any():
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0)


def draw_mean(axes: Axes, x: DataFrame, y: DataFrame, label: str, **look: Any) -> None:
    """A thin line for every run, and their mean with a marker for each update."""
    axes.plot(x.T, y.T, color=look["color"], linewidth=0.5, alpha=0.3)
    axes.plot(x.mean(), y.mean(), **look, markersize=4, linewidth=1.5, label=label)


def bars(estimates: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """How far intervals (mean, low, high) reach below and above, [2, estimates]; infinite ones are not drawn."""
    means, lows, highs = np.array(estimates).T
    return np.where(np.isfinite(lows), [means - lows, highs - means], np.nan)


def color_of(name: str) -> dict[str, Any]:
    """The colour of an algorithm's line, without its marker."""
    return {"color": LOOKS[name]["color"], "zorder": LOOKS[name]["zorder"]}


def finish(figure: Figure, panels: Sequence[Axes], title: str, path: Path) -> None:
    """Adds one legend for all panels below them, and saves the PNG."""
    handles = {
        label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, wrap=True)
    if handles:
        columns = min(len(handles), int(figure.get_figwidth() // 2.3))
        place = {"loc": "outside lower center", "ncols": columns, "fontsize": 9, "frameon": False}
        figure.legend(handles.values(), handles.keys(), **place)
    figure.savefig(path, dpi=130)
