"""Figures of paired differences: a panel a case, a row an algorithm, and a mark for each way of
training or judging.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.report.measures import name_of
from benchmarks.frontier.runs.plan import Run
from fastp3o.evaluation.matched_kl import Estimate

COLORS = {
    "joint": "#0072B2",
    "separate": "#56B4E9",
    "none": "#8C8C8C",
    "ppo": "#D55E00",
    "dpo": "#009E73",
    "rloo": "#CC79A7",
    "grpo": "#E69F00",
    "dr_grpo": "#A6761D",
    "dapo": "#7B3294",
    "gspo": "#B2182B",
    "rloo-response": "#CC79A7",
    "rloo-token": "#CC79A7",
    "grpo-k1": "#E69F00",
    "dr_grpo-k1": "#A6761D",
    "dapo-k1": "#7B3294",
    "oapl": "#66A61E",
    "vespo": "#E7298A",
    "copg": "#1B9E77",
    "rebel": "#1B7837",
    "ppo_centred": "#F4A582",
}


class Mark(NamedTuple):
    marker: str
    words: str
    filled: bool = True


class Row(NamedTuple):
    """The differences of one algorithm, by the name of their mark. None: not measured."""

    arm: Run
    differences: Mapping[str, Estimate | None]


def draw(
    panels: Mapping[str, list[Row]],
    marks: Mapping[str, Mark],
    *,
    minus: str,
    title: str,
    path: Path,
) -> bool:
    """Writes an SVG. Returns False, and writes none, if a panel has nothing to show.

    panels: title -> rows, which may differ between panels. minus: what the differences are taken
    to.
    """
    if not panels or not all(any(measured(row) for row in rows) for rows in panels.values()):
        return False
    names = list(
        dict.fromkeys(name_of(row.arm) for rows in panels.values() for row in rows if measured(row))
    )
    page = Figure(figsize=(10, 1.4 + 0.34 * len(names)), layout="constrained")
    every = page.subplots(1, len(panels), sharey=True, sharex=True)
    for axes, (name, rows) in zip(every, panels.items(), strict=True):
        axes.axvline(0, color="#BBBBBB", linewidth=0.8, zorder=0)
        for row in filter(measured, rows):
            draw_row(axes, row, names.index(name_of(row.arm)), marks)
        axes.set(title=name, xlabel=f"minus {minus}")
        for mark in marks.values():  # for the legend
            inside = "black" if mark.filled else "white"
            axes.plot([], [], mark.marker, color="black", markerfacecolor=inside, label=mark.words)
    every[0].set_yticks(range(len(names)), names)
    every[0].invert_yaxis()
    finish(page, every, title, path)
    return True


def measured(row: Row) -> bool:
    return any(row.differences.values())


def draw_row(axes: Axes, row: Row, place: int, marks: Mapping[str, Mark]) -> None:
    color = COLORS[row.arm.algorithm]
    for number, (name, mark) in enumerate(marks.items()):
        estimate = row.differences.get(name)
        if estimate is not None:
            height = place + 0.16 * (number - (len(marks) - 1) / 2)
            look: dict[str, Any] = {
                "color": color,
                "markersize": 6,
                "linestyle": "",
                "elinewidth": 1.2,
            }
            look |= {"marker": mark.marker, "markerfacecolor": color if mark.filled else "white"}
            axes.errorbar([estimate.mean], [height], xerr=bars([estimate[:3]]), **look)


def bars(estimates: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """How far intervals (mean, low, high) reach below and above, [2, estimates]; infinite ones are
    not drawn.
    """
    means, lows, highs = np.array(estimates).T
    return np.where(np.isfinite(lows), [means - lows, highs - means], np.nan)


def finish(figure: Figure, panels: Sequence[Axes], title: str, path: Path) -> None:
    """Adds one legend for all panels below them, and saves the SVG."""
    handles = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    for axes in panels:
        axes.set_axisbelow(True)
        axes.grid(alpha=0.25, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11, wrap=True)
    if handles:
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower center",
            ncols=min(len(handles), int(figure.get_figwidth() // 2.3)),
            fontsize=9,
            frameon=False,
        )
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
