"""Recorded runs -> the figures beside them, in the manner of figures 3 to 5 of arXiv 2310.00212.

Every function returns False, and writes nothing, where its runs have not been made.
"""

import math
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.drawing import (
    KL,
    LOOKS,
    NAMES,
    bars,
    curves,
    draw_gains,
    draw_mean,
    enough_runs,
    finish,
    gain_label,
)
from benchmarks.frontier.report.endpoints import ends
from benchmarks.frontier.report.sanity import Optimum, known_points
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study
from benchmarks.frontier.runs.plan import ALGORITHMS, CLIPPINGS, HIGH_LEARNING_RATE, KL_COEFS, LEARNING_RATES
from benchmarks.frontier.runs.records import by_task
from benchmarks.frontier.tasks.groups import LANGUAGES, STUDIED, TASKS
from benchmarks.frontier.tasks.offsets import OFFSETS
from fastp3o.evaluation.matched_kl import interval, line

OFFSET_TITLES = {"none": "no offset", "learnable": "learnable offset", "unlearnable": "unlearnable offset"}
WIN_COLORS = {"reward": "#0072B2", "gold": "#E69F00"}
WIN_NAMES = {"reward": "by the proxy", "gold": "by the gold utility"}


def frontier(study: Study, optimum: Optimum, group: str, path: Path) -> bool:
    """Gain over KL, by offset and outcome."""
    arms = {(name, offset): enough_runs(study, group, Arm(name, offset)) for name in ALGORITHMS for offset in OFFSETS}
    arms = {key: runs for key, runs in arms.items() if runs is not None}
    offsets = [offset for offset in OFFSETS if any(offset == key[1] for key in arms)]
    if not offsets:
        return False
    outcomes = OUTCOMES[group]
    figure = Figure(figsize=(0.6 + 4.1 * len(offsets), 1.2 + 3.2 * len(outcomes)), layout="constrained")
    grid = figure.subplots(len(outcomes), len(offsets), squeeze=False, sharex=True, sharey="row")
    for panels, (outcome, outcome_name) in zip(grid, outcomes.items(), strict=True):
        for axes, offset in zip(panels, offsets, strict=True):
            for (name, with_offset), runs in arms.items():
                if with_offset == offset:
                    draw_gains(axes, study, runs, outcome, NAMES[name], **LOOKS[name])
            if offset != "none" and ("ppo", "none") in arms:
                means = [curves(study, arms["ppo", "none"], column).mean() for column in ("kl", f"{outcome}_gain")]
                axes.plot(*means, "--", color=LOOKS["ppo"]["color"], linewidth=1.2, label="PPO without offset")
            if outcome == "reward":
                draw_optimum(axes, optimum, group)
                axes.set_title(OFFSET_TITLES[offset], fontsize=10)
        panels[0].set_ylabel(gain_label(outcome_name))
    for axes in grid[-1]:
        axes.set_xlabel(KL)
    finish(figure, grid.ravel(), f"{group.capitalize()}: gain over KL, mean over seeds at each evaluated update", path)
    return True


def draw_optimum(axes: Axes, optimum: Optimum, group: str) -> None:
    """As far as its samples carry it, for every task of the group."""
    known = known_points(optimum)
    for _, points in known[known["task"].isin(TASKS[group])].groupby("task"):
        look = {"color": "black", "linewidth": 1, "linestyle": ":", "label": "optimum of a task"}
        axes.plot(points["kl"], points["reward_gain"], **look)


def kl_coefs(study: Study, path: Path) -> bool:
    """Where runs with each KL coefficient end."""
    groups = [group for group in STUDIED if any(len(swept_runs(study, group, name)) > 1 for name in ALGORITHMS)]
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


def swept_runs(study: Study, group: str, algorithm: str) -> list[DataFrame]:
    """The runs with each KL coefficient that has enough."""
    arms = [enough_runs(study, group, Arm(algorithm, kl_coef=kl_coef)) for kl_coef in KL_COEFS[algorithm]]
    return [runs for runs in arms if runs is not None]


def draw_ends(axes: Axes, study: Study, group: str, algorithm: str) -> None:
    arms = swept_runs(study, group, algorithm)
    if len(arms) < 2:
        return
    kls, gains = ([interval(by_task(runs[end])) for runs in arms] for end in ("final_kl", "final_reward"))
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
    arms = {name: enough_runs(study, LANGUAGES, Arm(name, learning_rate=HIGH_LEARNING_RATE)) for name in CLIPPINGS}
    if any(runs is None for runs in arms.values()):
        return False
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, runs in arms.items():
        kls = curves(study, runs, "kl")
        updates = DataFrame({step: step for step in kls}, index=kls.index)
        draw_mean(panels[0], updates, kls, NAMES[name], **LOOKS[name])
        draw_gains(panels[1], study, runs, "reward", NAMES[name], **LOOKS[name])
    panels[0].set(xlabel="update", ylabel=KL)
    panels[1].set(xlabel=KL, ylabel=gain_label("proxy"))
    finish(figure, panels, f"Languages: clipping at learning rate {cells.rate(HIGH_LEARNING_RATE)}", path)
    return True


def learning_rates(study: Study, path: Path) -> bool:
    """Gain over KL at every learning rate but the high one, a panel an algorithm."""
    rates = LEARNING_RATES[LANGUAGES]
    arms = {
        (algorithm, rate): enough_runs(study, LANGUAGES, Arm(algorithm, learning_rate=rate))
        for algorithm in ALGORITHMS
        for rate in rates
    }
    if len({rate for (_, rate), runs in arms.items() if runs is not None}) < 2:
        return False
    figure = Figure(figsize=(14, 4), layout="constrained")
    panels = figure.subplots(1, len(ALGORITHMS), sharex=True, sharey=True)
    for axes, algorithm in zip(panels, ALGORITHMS, strict=True):
        for number, rate in enumerate(rates):
            if (runs := arms[algorithm, rate]) is not None:
                look = {"color": colormaps["plasma"](0.8 * number / (len(rates) - 1)), "marker": "o"}
                draw_gains(axes, study, runs, "reward", f"learning rate {cells.rate(rate)}", **look)
        axes.set_title(f"{NAMES[algorithm]} ({cells.rate(study.chosen_rate(LANGUAGES, algorithm))})", fontsize=10)
        axes.set_xlabel("KL, nats per response")
    panels[0].set_ylabel(gain_label("proxy"))
    finish(figure, panels, "Languages: learning rates; the chosen one in parentheses", path)
    return True


def win_rates(rates: list[dict], path: Path) -> bool:
    """How often one model's response scores above another's, with its interval."""
    if not rates:
        return False
    duels = sorted({(STUDIED.index(rate["task"]), rate["equal_kl"] or math.inf) for rate in rates})
    figure = Figure(figsize=(0.6 + 5 * len(duels), 4.2), layout="constrained")
    panels = figure.subplots(1, len(duels), squeeze=False)[0]
    for axes, (group, equal_kl) in zip(panels, duels, strict=True):
        duel = (STUDIED[group], equal_kl if math.isfinite(equal_kl) else None)
        draw_win_rates(axes, [rate for rate in rates if (rate["task"], rate["equal_kl"]) == duel])
        where = f"where runs reached KL {equal_kl:g}" if math.isfinite(equal_kl) else "as runs ended"
        axes.set_title(f"{STUDIED[group]}, {where}", fontsize=10)
    finish(figure, panels, "Head to head, with 95% intervals", path)
    return True


def draw_win_rates(axes: Axes, rates: list[dict]) -> None:
    labels = list(dict.fromkeys(duel_label(rate) for rate in rates))
    kinds = list(dict.fromkeys(rate["by"] for rate in rates))
    height = 0.8 / len(kinds)
    for number, by in enumerate(kinds):
        judged = [rate for rate in rates if rate["by"] == by]
        places = [labels.index(duel_label(rate)) + (number - (len(kinds) - 1) / 2) * height for rate in judged]
        won = [(rate["win_rate"], rate["low"], rate["high"]) for rate in judged]
        look = {"color": WIN_COLORS[by], "label": WIN_NAMES[by], "error_kw": {"elinewidth": 1}}
        axes.barh(places, [mean for mean, _, _ in won], 0.9 * height, xerr=bars(won), **look)
    axes.axvline(0.5, color="black", linewidth=1)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1), xlabel="share of prompts won")


def duel_label(rate: dict) -> str:
    names = f"{NAMES[rate['first']]} over {NAMES[rate['second']]}"
    return f"{names}\nKL {rate['first_kl']:.1f} and {rate['second_kl']:.1f}"
