"""Figures of paired differences: a panel a case, a row an algorithm, and a mark for each way of training or judging."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.report import many
from benchmarks.frontier.report.drawing import LOOKS, bars, finish
from benchmarks.frontier.runs.plan import Run
from fastp3o.evaluation.matched_kl import Estimate


class Mark(NamedTuple):
    marker: str
    words: str
    filled: bool = True


class Row(NamedTuple):
    """The differences of one algorithm, by the name of their mark. None: not measured."""

    arm: Run
    differences: Mapping[str, Estimate | None]


def draw(panels: Mapping[str, list[Row]], marks: Mapping[str, Mark], *, minus: str, title: str, path: Path) -> bool:
    """Writes a PNG. Returns False, and writes none, if a panel has nothing to show.

    panels: title -> rows, which may differ between panels. minus: what the differences are taken to.
    """
    if not panels or not all(any(measured(row) for row in rows) for rows in panels.values()):
        return False
    names = list(dict.fromkeys(many.name_of(row.arm) for rows in panels.values() for row in rows if measured(row)))
    page = Figure(figsize=(10, 1.4 + 0.34 * len(names)), layout="constrained")
    every = page.subplots(1, len(panels), sharey=True, sharex=True)
    for axes, (name, rows) in zip(every, panels.items(), strict=True):
        axes.axvline(0, color="#BBBBBB", linewidth=0.8, zorder=0)
        for row in filter(measured, rows):
            draw_row(axes, row, names.index(many.name_of(row.arm)), marks)
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
