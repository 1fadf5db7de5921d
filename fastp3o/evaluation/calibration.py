"""Accuracy and calibration of a reward model: predicted probabilities σ(|r_w − r_l|) next to observed shares.

The order of a pair says nothing. The prediction is the probability that the response with the higher score is the
better one, and the observation is whether it is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastp3o.evaluation.verdicts import percentile_interval
from fastp3o.files import whole_file

BINS = 10
WIDTH = 0.5 / BINS


def judged(differences: Sequence[tuple[int, float]], path: Path, seed: int) -> dict[str, float]:
    """The accuracy's 95% interval, and the calibration error, plotted to `path`; empty if a difference is not finite.

    differences: each pair's prompt number and r_w − r_l. Accuracy is the share of pairs with the better response ahead,
    equal scores counting a half, averaged over prompts. The interval resamples prompts.
    """
    if not np.isfinite([difference for _, difference in differences]).all():
        return {}
    right_by_prompt: dict[int, list[float]] = {}
    for number, difference in sorted(differences):
        right_by_prompt.setdefault(number, []).append((np.sign(difference) + 1) / 2)
    shares = np.array([np.mean(right) for right in right_by_prompt.values()])
    low, high = percentile_interval(shares, np.ones(len(shares)), seed=seed)
    bins = calibration([difference for _, difference in differences])
    accuracy = f"accuracy {shares.mean():.3f}, 95% {low:.3f} to {high:.3f}"
    plot_calibration(bins, path, f"{accuracy}; {len(differences)} pairs, {len(shares)} prompts")
    return {"accuracy_low": low, "accuracy_high": high, "calibration_error": calibration_error(bins)}


class Bin(NamedTuple):
    """Pairs with similar predictions, from `start` to the start of the next bin.

    predicted: their mean. observed: the share in which the better response has the higher score, equal scores counting
    a half.
    """

    start: float
    predicted: float
    observed: float
    pairs: int


def calibration(differences: Sequence[float]) -> list[Bin]:
    """Bins of equal width from 1/2 to 1, without the empty ones. differences: r_w − r_l of the pairs, finite."""
    values = np.asarray(differences, dtype=float)
    predicted = 1 / (1 + np.exp(-np.abs(values)))
    right = (np.sign(values) + 1) / 2
    bin_numbers = np.minimum(((predicted - 0.5) / WIDTH).astype(int), BINS - 1)
    bins = []
    for number in np.unique(bin_numbers):
        inside = bin_numbers == number
        mean, observed = float(predicted[inside].mean()), float(right[inside].mean())
        bins.append(Bin(0.5 + WIDTH * int(number), mean, observed, int(inside.sum())))
    return bins


def calibration_error(bins: Sequence[Bin]) -> float:
    """The expected calibration error: the mean distance of prediction and observation, bins weighted by their pairs."""
    return sum(b.pairs * abs(b.predicted - b.observed) for b in bins) / sum(b.pairs for b in bins)


def plot_calibration(bins: Sequence[Bin], path: Path, title: str) -> None:
    """Writes a PNG, complete or not at all: observed over predicted shares, and below them the pairs of each bin."""
    from matplotlib.figure import Figure  # not above: a stage without evaluations does without it

    figure = Figure(figsize=(5.5, 6), layout="constrained")
    axes, counts = figure.subplots(2, sharex=True, height_ratios=[4, 1])
    axes.plot([0.5, 1], [0.5, 1], "--", color="grey", linewidth=1, label="as sure as right")
    axes.plot([b.predicted for b in bins], [b.observed for b in bins], "o", markersize=5)
    axes.set_ylabel("observed share")
    axes.set_ylim(-0.02, 1.02)
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right")
    bars = counts.bar([b.start for b in bins], [b.pairs for b in bins], width=WIDTH, align="edge", edgecolor="white")
    counts.bar_label(bars, fontsize=7)
    counts.margins(y=0.2)
    counts.set_ylabel("pairs")
    counts.set_xlabel("predicted share of pairs with the better response ahead")
    axes.grid(alpha=0.3)
    axes.set_xlim(0.49, 1.01)
    with whole_file(path) as file:
        figure.savefig(file, dpi=150, format="png")
