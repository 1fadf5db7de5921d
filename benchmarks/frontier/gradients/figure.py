"""The figure and the table of gradients.json.

python -m benchmarks.frontier.gradients.figure
"""

import json
from itertools import product
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from pandas import DataFrame, concat

from benchmarks.frontier.gradients.losses import LOSSES
from benchmarks.frontier.gradients.measure import RECORD
from benchmarks.frontier.report.drawing import LOOKS, NAMES
from benchmarks.report import write_between

FIGURE = RECORD.with_suffix(".png")
PAGE = Path(__file__).parent / "README.md"
BATCH = 512  # responses
STYLES = {name: {key: look[key] for key in ("color", "marker")} for name, look in LOOKS.items()} | {
    "rloo_ratios": {"color": "#CC79A7", "marker": "P", "linestyle": "--"},
    "gspo_wide": {"color": "#B2182B", "marker": "h", "linestyle": "--"},
    "exact_baseline": {"color": "black", "marker": ".", "linestyle": ":"},
}
TITLES = NAMES | {
    "rloo": "RLOO, no ratios",
    "rloo_ratios": "RLOO, whole ratios",
    "gspo_wide": "GSPO, ε 0.03",
    "exact_baseline": "whole ratios, exact baseline",
    "ppo": "PPO, exact values",
}
MOVES = {"trained": "moved by training", "random": "moved at random"}


def alignments(rows: DataFrame) -> DataFrame:
    """The squared cosine of a batch's gradient with the exact one, negative where it points away; means over tasks.

    A batch of n groups has the mean's length and a variance of one n-th of a group's: with the mean's part along the
    exact gradient as 1, its squared length is 1 / cosine² + noise² / n.
    """
    groups = BATCH / rows["K"]
    squared = 1 / (1 / rows["cosine"] ** 2 + rows["noise"] ** 2 / groups)
    rows = rows.assign(alignment=squared.where(rows["cosine"] > 0, -squared))
    return rows.groupby(["moved", "loss", "K", "kl"])[["alignment", "cosine", "noise"]].mean().reset_index()


def draw(rows: DataFrame) -> None:
    sizes = sorted(rows["K"].unique())
    figure, panels = plt.subplots(2, len(sizes), figsize=(12, 7.5), sharey=True, sharex=True, layout="constrained")
    fresh = rows[rows["kl"] == 0].assign(moved="random")  # a policy that has not moved
    rows = concat([rows, fresh]).sort_values("kl")
    for (direction, K), panel in zip(product(MOVES, sizes), panels.flat, strict=True):
        chosen = rows[(rows["moved"] == direction) & (rows["K"] == K)]
        for loss in LOSSES:
            part = chosen[chosen["loss"] == loss]
            panel.plot(part["kl"], part["alignment"], label=TITLES[loss], markersize=4, linewidth=1.4, **STYLES[loss])
        panel.axhline(0, color="#BBBBBB", linewidth=0.8, zorder=0)
        panel.set_title(f"{MOVES[direction]}, {K} responses", fontsize=10)
    figure.supxlabel("KL of the policy to the one that sampled, nats per response")
    figure.supylabel(f"squared cosine with the exact gradient, {BATCH} responses")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(FIGURE, dpi=120)
    plt.close(figure)


def table(rows: DataFrame) -> str:
    """Squared cosines by loss, of policies that training has moved and, after a slash, that have moved at random."""
    columns = [(K, nats) for K in sorted(rows["K"].unique()) for nats in (0.0, 0.25, 1.0)]
    lines = [
        "| loss | " + " | ".join(f"K {K}, KL {nats:g}" for K, nats in columns) + " |",
        "| --- |" + " --- |" * len(columns),
    ]
    found = rows.set_index(["moved", "loss", "K", "kl"])["alignment"]
    for loss in sorted(LOSSES, key=lambda loss: -found["trained", loss, 16, 1.0]):
        cells = (
            " / ".join(f"{found[direction, loss, K, nats]:.2f}" for direction in (MOVES if nats else ["trained"]))
            for K, nats in columns
        )
        lines.append(f"| {TITLES[loss]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_figure_and_table() -> None:
    rows = alignments(DataFrame(json.loads(RECORD.read_text())))
    draw(rows)
    write_between(PAGE, "gradients", table(rows))


if __name__ == "__main__":
    write_figure_and_table()
