"""Recorded runs of the first comparison -> figures, one question each.

Every function returns False, and writes nothing, if its runs have not been made.
"""

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import DataFrame

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.comparisons import KLS
from benchmarks.frontier.report.drawing import (
    KL,
    LOOKS,
    NAMES,
    bars,
    color_of,
    curves,
    draw_at_kls,
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
from fastp3o.evaluation.matched_kl import interval, line

WIN_COLORS = {"reward": "#0072B2", "gold": "#E69F00"}
WIN_NAMES = {"reward": "by the learned reward (proxy)", "gold": "by the true utility (gold)"}
# Under an offset, line styles tell PPO's rates apart; without one, PPO does best at PPO_RATE and DPO at DPO_RATE.
PPO_RATE, DPO_RATE = 3e-4, 7.5e-5
STYLES = {1.5e-4: "-", 3e-4: "--", 6e-4: ":"}


def kls_up_to(kl: float) -> np.ndarray:
    return np.linspace(kl / 60, kl, 60)


def frontier(study: Study, optimum: Optimum, path: Path) -> bool:
    """Gain over KL without an offset, up to the highest KL of the claims: a panel an outcome."""
    group = LANGUAGES
    arms = {Arm(name): {"label": NAMES[name]} for name in ALGORITHMS}
    # The rates that the selection seeds did not choose, at which rivals do better than at theirs.
    for name, rate in (("ppo", PPO_RATE), ("dpo", DPO_RATE)):
        label = f"{NAMES[name]}, rate {cells.rate(rate)}"
        arms[Arm(name, learning_rate=rate)] = {"label": label, "linestyle": "--", "band": False}
    found = {arm: enough_runs(study, group, arm) for arm in arms}
    if all(runs is None for runs in found.values()):
        return False
    outcomes, highest = OUTCOMES[group], KLS[group][-1]
    figure = Figure(figsize=(0.8 + 4.6 * len(outcomes), 4.6), layout="constrained")
    panels = figure.subplots(1, len(outcomes), squeeze=False, sharey=True)[0]
    for axes, (outcome, name) in zip(panels, outcomes.items(), strict=True):
        for arm, runs in found.items():
            if runs is not None:
                look = color_of(arm.algorithm) | arms[arm]
                draw_at_kls(axes, study, runs, outcome, kls_up_to(1.05 * highest), **look)
        if outcome == "reward":
            draw_optimum(axes, optimum, group)
        axes.set(xlabel=KL, ylabel=gain_label(name), xlim=(0, 1.05 * highest), ylim=(0, None))
    finish(figure, panels, "Languages, no offset: mean over eight seeds and its 95% interval", path)
    return True


def draw_optimum(axes: Axes, optimum: Optimum, group: str) -> None:
    """The best gain possible, up to the KL that its samples support, for every task of the group."""
    known = known_points(optimum)
    for _, points in known[known["task"].isin(TASKS[group])].groupby("task"):
        look = {"color": "black", "linewidth": 1, "linestyle": ":", "label": "best possible on a task"}
        axes.plot(points["kl"], points["reward_gain"], **look)


def offset(study: Study, path: Path) -> bool:
    """What an offset per prompt does to P3O and PPO: unpredictable on the left, visible in the prompt on the right."""
    if not has_offset_runs(study):
        return False
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, kind, title in zip(
        panels, ("unlearnable", "learnable"), ("no critic can predict it", "the prompt shows it"), strict=True
    ):
        draw_offset(axes, study, kind)
        axes.set(title=f"offset of 10 std per prompt: {title}", xlabel=KL, xlim=(0, 4.2), ylim=(-0.05, None))
    panels[0].set_ylabel(gain_label("proxy"))
    finish(figure, panels, "Languages: P3O does not see the offset, PPO does", path)
    return True


def has_offset_runs(study: Study) -> bool:
    arms = Arm("joint", "unlearnable"), Arm("ppo", "unlearnable"), Arm("ppo", learning_rate=PPO_RATE)
    return all(enough_runs(study, LANGUAGES, arm) is not None for arm in arms)


def draw_offset(axes: Axes, study: Study, kind: str) -> None:
    """P3O, PPO without the offset, and PPO with it at every rate that ran on most seeds."""
    joint = study.runs_of(LANGUAGES, Arm("joint", "unlearnable"))
    plain = study.runs_of(LANGUAGES, Arm("ppo", learning_rate=PPO_RATE))
    look = color_of("joint") | {"label": "P3O, with or without offset"}
    draw_at_kls(axes, study, joint, "reward", kls_up_to(4.2), **look)
    look = {"color": "#8C8C8C", "label": f"PPO without offset, rate {cells.rate(PPO_RATE)}"}
    draw_at_kls(axes, study, plain, "reward", kls_up_to(4.2), **look)
    chosen = study.chosen_rate(LANGUAGES, "ppo")
    rates = [rate for rate in LEARNING_RATES[LANGUAGES] if rate != chosen] + [None]
    for rate in rates:
        runs = enough_runs(study, LANGUAGES, Arm("ppo", kind, rate))
        if runs is not None:
            rate = rate or chosen
            look = {"linestyle": STYLES.get(rate, "-."), "label": f"PPO with offset, rate {cells.rate(rate)}"}
            draw_at_kls(axes, study, runs, "reward", kls_up_to(4.2), **color_of("ppo"), **look)


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
    """KL over updates, and gain over KL, at the high learning rate."""
    arms = {name: enough_runs(study, LANGUAGES, Arm(name, learning_rate=HIGH_LEARNING_RATE)) for name in CLIPPINGS}
    if any(runs is None for runs in arms.values()):
        return False
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, runs in arms.items():
        kls = curves(study, runs, "kl")
        updates = DataFrame({step: step for step in kls}, index=kls.index)
        draw_mean(panels[0], updates, kls, NAMES[name], **LOOKS[name])
        draw_at_kls(panels[1], study, runs, "reward", kls_up_to(16), **color_of(name))
    panels[0].set(xlabel="update", ylabel=KL, ylim=(0, 30))
    panels[1].set(xlabel=KL, ylabel=gain_label("proxy"), xlim=(0, 16), ylim=(0, None))
    finish(figure, panels, f"Languages: clipping at learning rate {cells.rate(HIGH_LEARNING_RATE)}", path)
    return True


def learning_rates(study: Study, path: Path) -> bool:
    """The gain at KL 2 over the learning rate, on the seeds that chose it: one line an algorithm."""
    rates, kl = LEARNING_RATES[LANGUAGES], 2.0
    figure = Figure(figsize=(6.4, 4.6), layout="constrained")
    axes = figure.subplots()
    drawn = 0
    for algorithm in ALGORITHMS:
        runs = {rate: study.runs_of(LANGUAGES, Arm(algorithm, learning_rate=rate), selection=True) for rate in rates}
        gains = {rate: study.records.at_kl(found, kl, "reward") for rate, found in runs.items()}
        means = {rate: values.mean() for rate, values in gains.items() if len(values) and values.notna().all()}
        if len(means) > 1:
            drawn += 1
            axes.plot(means.keys(), means.values(), **LOOKS[algorithm], linewidth=1.5, label=NAMES[algorithm])
    if not drawn:
        return False
    axes.set(xscale="log", xlabel="learning rate", ylabel=f"{gain_label('proxy')}, at KL {kl:g}")
    axes.set_xticks(rates, [cells.rate(rate) for rate in rates])
    axes.minorticks_off()
    finish(figure, [axes], "Languages: the learning rate, on the two seeds that chose it", path)
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
    finish(figure, panels, "P3O with joint clipping head to head, with 95% intervals", path)
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
    return f"against {NAMES[rate['second']]}\nKL {rate['first_kl']:.1f} and {rate['second_kl']:.1f}"
