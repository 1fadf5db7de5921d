"""Tables for accelerate's trackers: Markdown for TensorBoard, tables of W&B and trackio; other trackers get none."""

import re
from collections.abc import Sequence

from accelerate.tracking import GeneralTracker

Cell = str | float | None

# What means something to Markdown, to its tables or to HTML.
MARKS = re.compile(r"[!-/:-@\[-`{-~]")


def log_table(
    tracker: GeneralTracker, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]], step: int
) -> None:
    """Sends a table to a tracker."""
    if tracker.name == "tensorboard":
        tracker.log({name: markdown(columns, rows)}, step=step)
    elif tracker.name == "wandb":
        tracker.log_table(name, columns=list(columns), data=[list(row) for row in rows], step=step)
    elif tracker.name == "trackio":
        # Installed where these trackers are: its table takes no other form with names of columns.
        import pandas
        import trackio

        frame = pandas.DataFrame([list(row) for row in rows], columns=list(columns))
        tracker.log({name: trackio.Table(dataframe=frame)}, step=step)


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table in Markdown, in which texts are shown as they are."""
    lines = [[plain_text(column) for column in columns], ["---"] * len(columns)]
    lines += [[plain_text(cell) for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain_text(cell: Cell) -> str:
    """A cell of a table in Markdown."""
    if cell is None:
        return ""
    text = cell if isinstance(cell, str) else f"{cell:.4g}"
    lines = MARKS.sub(lambda mark: f"&#{ord(mark[0])};", text).splitlines()
    return "<br>".join(lines)
