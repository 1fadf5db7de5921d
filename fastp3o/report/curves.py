"""The curves of several runs in one picture: the panels of progress.png, with a color for each run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastp3o.report.read import LoggedRun
from fastp3o.run.plot import panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)  # Okabe and Ito's


def draw_curves(runs: Sequence[LoggedRun]) -> "Figure | None":
    """Training as lines, evaluations as points on dashed lines. None if no run has logged a step."""
    import pandas as pd
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    frames = [(pd.DataFrame(run.steps), pd.DataFrame(run.evaluations)) for run in runs]
    logged = [
        {name for frame in of_all for name in frame.columns} for of_all in zip(*frames, strict=True)
    ]
    titles, unit = panels(*logged)
    if not titles:
        return None
    columns = min(len(titles), 3)
    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(4.2 * columns, 2.6 * rows + 0.5), layout="constrained")
    for place, (metric, title) in enumerate(titles.items(), 1):
        axes = figure.add_subplot(rows, columns, place)
        for number, (steps, evaluated) in enumerate(frames):
            color = COLORS[number % len(COLORS)]
            if metric in steps:
                axes.plot(
                    steps.set_index("step")[metric].dropna(), color=color, alpha=0.6, linewidth=1.1
                )
            if metric in evaluated:
                values = evaluated.set_index("step")[metric].dropna()
                axes.plot(values, "o--", color=color, markersize=4.5, linewidth=0.8)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(unit, fontsize=9)
        axes.tick_params(labelsize=8)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    handles = [Line2D([], [], color=COLORS[number % len(COLORS)]) for number in range(len(runs))]
    labels = [run.name.replace("$", r"\$") for run in runs]
    handles += [
        Line2D([], [], color="gray"),
        Line2D([], [], color="gray", marker="o", linestyle="--"),
    ]
    labels += ["training", "evaluation"]
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(len(labels), 4), fontsize=9
    )
    return figure
