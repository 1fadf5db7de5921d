"""Recorded runs -> the figures beside them, in the manner of figures 3 to 5 of arXiv 2310.00212.

    python benchmarks/frontier/figures.py

Every function returns False, and writes nothing, where its runs have not been made.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.frontier import cells
from benchmarks.frontier.drawing import (
    KL,
    LOOKS,
    NAMES,
    bars,
    curves,
    draw_curves,
    draw_mean,
    drawn,
    finish,
    gain_label,
    shared_updates,
)
from benchmarks.frontier.endpoints import CLIPPINGS, ends, final_gains, final_kls
from benchmarks.frontier.plan import (
    ALGORITHMS,
    DOCSTRINGS,
    GROUPS,
    HIGH_LEARNING_RATE,
    KL_COEFS,
    LEARNING_RATES,
    group_of,
)
from benchmarks.frontier.records import OFFSETS, OUTCOMES, RESULTS, Arm, Record, Study, by_task, load, read
from benchmarks.frontier.sanity import SMALLEST_ESS, Optimum
from fastp3o.evaluation.matched_kl import interval, line

LANGUAGES = "languages"
OFFSET_TITLES = {"none": "no offset", "learnable": "learnable offset", "unlearnable": "unlearnable offset"}
WIN_COLORS = {"reward": "#0072B2", "gold": "#E69F00"}
WIN_NAMES = {"reward": "by the proxy", "gold": "by the gold utility"}


def frontier(study: Study, optimum: Optimum, group: str, path: Path) -> bool:
    """Gain over KL, by offset and outcome."""
    offsets = [offset for offset in OFFSETS if any(drawn(study, group, Arm(name, offset)) for name in ALGORITHMS)]
    if not offsets:
        return False
    outcomes = OUTCOMES[group]
    figure = Figure(figsize=(0.6 + 4.1 * len(offsets), 1.2 + 3.2 * len(outcomes)), layout="constrained")
    grid = figure.subplots(len(outcomes), len(offsets), squeeze=False, sharex=True, sharey="row")
    for row, (of, outcome) in zip(grid, outcomes.items(), strict=True):
        for axes, offset in zip(row, offsets, strict=True):
            for algorithm in ALGORITHMS:
                if runs := drawn(study, group, Arm(algorithm, offset)):
                    draw_curves(axes, runs, of, NAMES[algorithm], **LOOKS[algorithm])
            if offset != "none" and (runs := drawn(study, group, Arm("ppo"))):
                mean = curves(runs, of).mean(axis=0)
                axes.plot(*mean.T, "--", color=LOOKS["ppo"]["color"], linewidth=1.2, label="PPO without offset")
            if of == "reward":
                draw_optimum(axes, optimum, group)
                axes.set_title(OFFSET_TITLES[offset], fontsize=10)
        row[0].set_ylabel(gain_label(outcome))
    for axes in grid[-1]:
        axes.set_xlabel(KL)
    finish(figure, grid.ravel(), f"{group.capitalize()}: gain over KL, mean over seeds at each evaluated update", path)
    return True


def draw_optimum(axes: Axes, optimum: Optimum, group: str) -> None:
    """As far as its samples carry it, for every task of the group."""
    for task, points in optimum.items():
        known = [(point["kl"], point["reward_gain"]) for point in points if point["ess"] >= SMALLEST_ESS]
        if group_of(task) == group and known:
            look = {"color": "black", "linewidth": 1, "linestyle": ":", "label": "optimum of a task"}
            axes.plot(*zip(*sorted(known), strict=True), **look)


def sweep(study: Study, path: Path) -> bool:
    """Where runs with each KL coefficient end."""
    groups = [group for group in GROUPS if any(len(swept(study, group, name)) > 1 for name in ALGORITHMS)]
    if not groups:
        return False
    figure = Figure(figsize=(0.6 + 5 * len(groups), 4.6), layout="constrained")
    panels = figure.subplots(1, len(groups), squeeze=False)[0]
    for axes, group in zip(panels, groups, strict=True):
        for algorithm in ALGORITHMS:
            draw_ends(axes, study, group, algorithm)
        axes.set(title=group, xlabel=f"final {KL}", ylabel=gain_label("proxy"))
    title = "Ends of runs by KL coefficient: 95% intervals over seeds, and the line through all ends"
    finish(figure, panels, title, path)
    return True


def swept(study: Study, group: str, algorithm: str) -> list[list[Record]]:
    """The runs with each KL coefficient that has enough."""
    arms = (Arm(algorithm, kl_coef=kl_coef) for kl_coef in KL_COEFS[algorithm])
    return [runs for arm in arms if (runs := drawn(study, group, arm))]


def draw_ends(axes: Axes, study: Study, group: str, algorithm: str) -> None:
    arms = swept(study, group, algorithm)
    if len(arms) < 2:
        return
    kls = [interval(by_task(final_kls(runs))) for runs in arms]
    gains = [interval(by_task(final_gains(runs, "reward"))) for runs in arms]
    x, y = ([estimate.mean for estimate in found] for found in (kls, gains))
    look = {"linestyle": "", "markersize": 5, "elinewidth": 1, "label": NAMES[algorithm]}
    axes.errorbar(
        x, y, xerr=bars([kl[:3] for kl in kls]), yerr=bars([gain[:3] for gain in gains]), **look, **LOOKS[algorithm]
    )
    if fit := line(ends(study, group, algorithm)):
        span = np.array([min(x), max(x)])
        axes.plot(span, fit.slope * span + fit.intercept, linewidth=1, color=LOOKS[algorithm]["color"])


def clipping(study: Study, path: Path) -> bool:
    """KL over updates and gain over KL at the high learning rate."""
    arms = {name: drawn(study, LANGUAGES, Arm(name, learning_rate=HIGH_LEARNING_RATE)) for name in CLIPPINGS}
    if not all(arms.values()):
        return False
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, runs in arms.items():
        kls = curves(runs, "reward")[:, :, 0]
        over_updates = np.stack([np.broadcast_to(shared_updates(runs), kls.shape), kls], axis=-1)
        draw_mean(panels[0], over_updates, NAMES[name], **LOOKS[name])
        draw_curves(panels[1], runs, "reward", NAMES[name], **LOOKS[name])
    panels[0].set(xlabel="update", ylabel=KL)
    panels[1].set(xlabel=KL, ylabel=gain_label("proxy"))
    finish(figure, panels, f"Languages: clipping at learning rate {cells.rate(HIGH_LEARNING_RATE)}", path)
    return True


def learning_rates(study: Study, path: Path) -> bool:
    """Gain over KL at every learning rate but the high one, a panel an algorithm."""
    rates = LEARNING_RATES[LANGUAGES]
    found = {
        (algorithm, rate): runs
        for algorithm in ALGORITHMS
        for rate in rates
        if (runs := drawn(study, LANGUAGES, Arm(algorithm, learning_rate=rate)))
    }
    if len({rate for _, rate in found}) < 2:
        return False
    figure = Figure(figsize=(14, 4), layout="constrained")
    panels = figure.subplots(1, len(ALGORITHMS), sharex=True, sharey=True)
    for axes, algorithm in zip(panels, ALGORITHMS, strict=True):
        for number, rate in enumerate(rates):
            if runs := found.get((algorithm, rate)):
                color = colormaps["plasma"](0.8 * number / (len(rates) - 1))
                draw_curves(axes, runs, "reward", f"learning rate {cells.rate(rate)}", color=color, marker="o")
        axes.set_title(f"{NAMES[algorithm]} ({cells.rate(study.rate(LANGUAGES, algorithm))})", fontsize=10)
        axes.set_xlabel("KL, nats per response")
    panels[0].set_ylabel(gain_label("proxy"))
    finish(figure, panels, "Languages: learning rates; the chosen one in parentheses", path)
    return True


def win_rates(rates: list[dict], path: Path) -> bool:
    """How often one model's response scores above another's, with its interval."""
    if not rates:
        return False
    duels = sorted({(GROUPS.index(rate["task"]), rate["equal_kl"] or math.inf) for rate in rates})
    figure = Figure(figsize=(0.6 + 5 * len(duels), 4.2), layout="constrained")
    panels = figure.subplots(1, len(duels), squeeze=False)[0]
    for axes, (group, equal_kl) in zip(panels, duels, strict=True):
        of_duel = (GROUPS[group], equal_kl if math.isfinite(equal_kl) else None)
        draw_win_rates(axes, [rate for rate in rates if (rate["task"], rate["equal_kl"]) == of_duel])
        where = f"where runs reached KL {equal_kl:g}" if math.isfinite(equal_kl) else "as runs ended"
        axes.set_title(f"{GROUPS[group]}, {where}", fontsize=10)
    finish(figure, panels, "Head to head, with 95% intervals", path)
    return True


def draw_win_rates(axes: Axes, rates: list[dict]) -> None:
    pairs = list(dict.fromkeys(pair_of(rate) for rate in rates))
    kinds = list(dict.fromkeys(rate["by"] for rate in rates))
    height = 0.8 / len(kinds)
    for number, by in enumerate(kinds):
        of_kind = [rate for rate in rates if rate["by"] == by]
        places = [pairs.index(pair_of(rate)) + (number - (len(kinds) - 1) / 2) * height for rate in of_kind]
        won = [(rate["win_rate"], rate["low"], rate["high"]) for rate in of_kind]
        look = {"color": WIN_COLORS[by], "label": WIN_NAMES[by], "error_kw": {"elinewidth": 1}}
        axes.barh(places, [mean for mean, _, _ in won], 0.9 * height, xerr=bars(won), **look)
    axes.axvline(0.5, color="black", linewidth=1)
    axes.set_yticks(range(len(pairs)), pairs)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of prompts won")


def pair_of(rate: dict) -> str:
    names = f"{NAMES[rate['first']]} over {NAMES[rate['second']]}"
    return f"{names}\nKL {rate['first_kl']:.1f} and {rate['second_kl']:.1f}"


def main() -> None:
    study = load()
    optimum = json.loads(read(RESULTS / "optimum.json") or "{}")
    made = {
        "frontier.png": lambda path: frontier(study, optimum, LANGUAGES, path),
        "docstrings.png": lambda path: frontier(study, optimum, DOCSTRINGS, path),
        "sweep.png": lambda path: sweep(study, path),
        "clipping.png": lambda path: clipping(study, path),
        "learning_rates.png": lambda path: learning_rates(study, path),
        "win_rates.png": lambda path: win_rates(json.loads(read(RESULTS / "win_rates.json") or "[]"), path),
    }
    for name, draw in made.items():
        print(f"{name}: {'written' if draw(RESULTS / name) else 'skipped, its runs have not been made'}")


if __name__ == "__main__":
    main()
