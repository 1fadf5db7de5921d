"""Figures of paired differences: a panel a case, a row an algorithm, and a mark for each way of training or judging."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.report.measures import name_of
from benchmarks.frontier.runs.plan import Run
from fastp3o.evaluation.matched_kl import Estimate

# Later entries are drawn over earlier ones only where zorder says so.
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
    "ppo_centred": {"color": "#F4A582", "marker": "D", "zorder": 3},
    "joint-group": {"color": "#003C30", "marker": "x", "zorder": 3},
    "joint-difference": {"color": "#5E4FA2", "marker": "x", "zorder": 3},
}


class Mark(NamedTuple):
    marker: str
    words: str
    filled: bool = True


class Row(NamedTuple):
    """The differences of one algorithm, by the name of their mark. None: not measured."""

    arm: Run
    differences: Mapping[str, Estimate | None]


def draw(panels: Mapping[str, list[Row]], marks: Mapping[str, Mark], *, minus: str, title: str, path: Path) -> bool:
    """Writes an SVG. Returns False, and writes none, if a panel has nothing to show.

    panels: title -> rows, which may differ between panels. minus: what the differences are taken to.
    """
    if not panels or not all(any(measured(row) for row in rows) for rows in panels.values()):
        return False
    names = list(dict.fromkeys(name_of(row.arm) for rows in panels.values() for row in rows if measured(row)))
    page = Figure(figsize=(10, 1.4 + 0.34 * len(names)), layout="constrained")
    every = page.subplots(1, len(panels), sharey=True, sharex=True)
    for axes, (name, rows) in zip(every, panels.items(), strict=True):
        axes.axvline(0, color="#BBBBBB", linewidth=0.8, zorder=0)
        for row in filter(measured, rows):
            draw_row(axes, row, names.index(name_of(row.arm)), marks)
        axes.set(title=name, xlabel=f"minus {minus}")
        explain(axes, marks.values())
    every[0].set_yticks(range(len(names)), names)
    every[0].invert_yaxis()
    finish(page, every, title, path)
    return True


def measured(row: Row) -> bool:
    return any(row.differences.values())


def draw_row(axes: Axes, row: Row, place: int, marks: Mapping[str, Mark]) -> None:
    color = LOOKS[row.arm.algorithm]["color"]
    for number, (name, mark) in enumerate(marks.items()):
        estimate = row.differences.get(name)
        if estimate is not None:
            height = place + 0.16 * (number - (len(marks) - 1) / 2)
            look: dict[str, Any] = {"color": color, "markersize": 6, "linestyle": "", "elinewidth": 1.2}
            look |= {"marker": mark.marker, "markerfacecolor": color if mark.filled else "white"}
            axes.errorbar([estimate.mean], [height], xerr=bars([estimate[:3]]), **look)


def explain(axes: Axes, marks: Iterable[Mark]) -> None:
    """The marks' words for the legend."""
    for mark in marks:
        inside = "black" if mark.filled else "white"
        axes.plot([], [], mark.marker, color="black", markerfacecolor=inside, label=mark.words)


def bars(estimates: Sequence[tuple[float, float, float]]) -> np.ndarray:
    """How far intervals (mean, low, high) reach below and above, [2, estimates]; infinite ones are not drawn."""
    means, lows, highs = np.array(estimates).T
    return np.where(np.isfinite(lows), [means - lows, highs - means], np.nan)


def finish(figure: Figure, panels: Sequence[Axes], title: str, path: Path) -> None:
    """Adds one legend for all panels below them, and saves the SVG."""
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
    with rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None})
