"""Reward against sequence KL of one or several runs, as in figure 3 of arXiv 2310.00212, with a
line fitted to each.

fastp3o frontier runs/joint runs/separate --output frontier.png
"""

import argparse
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fastp3o.evaluation.matched_kl import Evaluations, read_run


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, help="Output folders of P3O runs, with evaluations."
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("frontier.png"),
        help="PNG file to write (default: frontier.png).",
    )
    arguments = parser.parse_args()
    names = [run.name for run in arguments.runs]
    runs = {
        run.name if names.count(run.name) == 1 else str(run): read_run(run)
        for run in arguments.runs
    }
    print_table(runs)
    plot(runs, arguments.output)
    print(f"plot: {arguments.output}")


def linear_fit(evaluations: Evaluations) -> tuple[float, float] | None:
    """Slope and intercept of reward over KL by least squares; None if all KLs are equal."""
    kl, reward = (np.array([e[key] for e in evaluations]) for key in ("kl", "reward"))
    if len(np.unique(kl)) < 2:
        return None
    slope, intercept = np.polyfit(kl, reward, deg=1)
    return float(slope), float(intercept)


def standard_error(evaluation: dict[str, float], name: str) -> float:
    """Standard error, over the evaluation prompts, of the mean of "reward" or "kl"."""
    return evaluation[f"{name}_std"] / evaluation["prompts"] ** 0.5


def print_table(runs: dict[str, Evaluations]) -> None:
    """Prints the first and the last evaluation of each run; ± is the standard deviation over the
    evaluation prompts.
    """
    table = Table(title="evaluation prompts: mean ± standard deviation (standard error)")
    for column in ("run", "update", "prompts", "reward", "KL to the reference, nats"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for name, evaluations in runs.items():
        for evaluation in (evaluations[0], evaluations[-1])[: len(evaluations)]:
            spreads = (
                f"{evaluation[key]:.3f} ± {evaluation[key + '_std']:.3f} ({standard_error(evaluation, key):.3f})"
                for key in ("reward", "kl")
            )
            table.add_row(
                name, f"{evaluation['step']:.0f}", f"{evaluation['prompts']:.0f}", *spreads
            )
    Console(width=110).print(table)


def plot(runs: dict[str, Evaluations], output: Path) -> None:
    """Writes a PNG: for each evaluation a point with standard errors and its update's number, for
    each run a line.
    """
    from matplotlib.figure import Figure  # not above: reading runs does without it

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for index, (name, evaluations) in enumerate(runs.items()):
        color = f"C{index}"
        kl, reward = ([e[key] for e in evaluations] for key in ("kl", "reward"))
        fit, label = linear_fit(evaluations), name
        if fit is not None:
            slope, intercept = fit
            ends = np.array([min(kl), max(kl)])
            axes.plot(ends, slope * ends + intercept, "--", linewidth=1, color=color)
            label = (
                f"{name}: {slope:.3f} · KL {'+' if intercept >= 0 else '−'} {abs(intercept):.2f}"
            )
        xerr, yerr = ([standard_error(e, key) for e in evaluations] for key in ("kl", "reward"))
        axes.errorbar(
            kl, reward, yerr, xerr, fmt="o", markersize=5, elinewidth=0.8, color=color, label=label
        )
        for evaluation in evaluations:
            number, place = f"{evaluation['step']:.0f}", (evaluation["kl"], evaluation["reward"])
            axes.annotate(
                number, place, (5, -10), textcoords="offset points", fontsize=8, color=color
            )
    axes.set_xlabel("KL to the reference, nats per response")
    axes.set_ylabel("reward")
    axes.set_title(
        "KL–reward frontier (numbers: updates; bars: standard error over prompts)", fontsize=10
    )
    axes.grid(alpha=0.3)
    axes.legend()
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)
