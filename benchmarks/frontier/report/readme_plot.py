"""The plot of the repository's README: what offsets of growing size cost PPO."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.report import measures
from benchmarks.frontier.report.figures import COLORS, bars
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.rewards import DEVIATIONS, PPO_RATES, ppo
from benchmarks.frontier.runs.tuned_arms import arm
from fastp3o.evaluation.matched_kl import Estimate, interval

GREY = "#768390"  # readable on white and on black
STYLE: dict[Any, object] = {  # the stubs of rc_context list every key that there is
    "svg.hashsalt": "offset",
    "svg.fonttype": "none",
    "font.size": 14,
    "font.sans-serif": ["Segoe UI", "Helvetica", "Arial", "DejaVu Sans"],
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def draw(study: Study, path: Path) -> bool:
    """An SVG with labels at the lines, for a page that is white or dark."""
    every = ends(study)
    found = {name: estimate for name, estimate in every.items() if estimate is not None}
    if len(found) < len(every):
        return False
    with rc_context(STYLE):
        figure = Figure(figsize=(6, 4.2), layout="constrained")
        axes = figure.subplots()
        draw_levels(axes, found)
        figure.savefig(
            path,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Description": summary(found)},
        )
    return True


def ends(study: Study) -> dict[str, Estimate | None]:
    """Mean reward − BETA KL of P3O, of PPO less the prompt's mean, and of PPO at its best rate
    under each offset.
    """
    found = {name: end(study, arm(name)) for name in ("joint", "ppo_centred")}
    for deviation in DEVIATIONS:
        known = [one for rate in PPO_RATES if (one := end(study, ppo(deviation, rate)))]
        found[f"{deviation:g}"] = max(known, key=lambda one: one.mean, default=None)
    return found


def end(study: Study, one: Run) -> Estimate | None:
    return interval(measures.by_seed(measures.measured(study, one), "end"))


def draw_levels(axes: Axes, found: Mapping[str, Estimate]) -> None:
    places, doses = range(len(DEVIATIONS)), [found[f"{deviation:g}"] for deviation in DEVIATIONS]
    means, errors = [one.mean for one in doses], bars([one[:3] for one in doses])
    joint, centred = found["joint"].mean, found["ppo_centred"].mean
    axes.plot(places, [joint] * len(places), color=COLORS["joint"], linewidth=2.2)
    axes.plot(places, [centred] * len(places), color=GREY, linestyle="--", linewidth=1.4)
    axes.errorbar(
        places, means, yerr=errors, color=COLORS["ppo"], marker="o", markersize=5, linewidth=2.2
    )
    axes.text(
        1.2, joint + 0.03, "P3O: the same weights under all", color=COLORS["joint"], fontsize=13
    )
    axes.text(3.1, centred - 0.08, "PPO less the", color=GREY, fontsize=12)
    axes.text(3.1, centred - 0.15, "prompt's mean reward", color=GREY, fontsize=12)
    axes.text(0.1, 0.6, "PPO at the best of", color=COLORS["ppo"], fontsize=13)
    axes.text(0.1, 0.52, "three learning rates", color=COLORS["ppo"], fontsize=13)
    axes.set_xticks(places, [f"{deviation:g}" for deviation in DEVIATIONS])
    axes.set(ylim=(0, 1.4), xlabel="offset per prompt, standard deviations of the reward")
    axes.set_ylabel(f"reward − {BETA:g} KL after training")
    axes.spines[["top", "right"]].set_visible(False)


def summary(found: Mapping[str, Estimate]) -> str:
    """The numbers that the plot shows, for its metadata."""
    means = {name: measures.estimate(one) for name, one in found.items()}
    return "Reward − 0.1 KL: " + "; ".join(f"{name} {mean}" for name, mean in means.items())
