"""The figures of every algorithm's envelope, of the questions, and of K at equal cost.

Every function returns False, and writes nothing, where its runs have not been made.
"""

from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import Series

from benchmarks.frontier.report import equal_cost, questions
from benchmarks.frontier.report.drawing import KL, LOOKS, NAMES, bars, finish, gain_label
from benchmarks.frontier.report.envelope import shares, tuned_arm
from benchmarks.frontier.report.sanity import Optimum
from benchmarks.frontier.report.study import OUTCOMES, Study
from benchmarks.frontier.runs.plan import EVERYONE, SEEDS
from benchmarks.frontier.runs.questions import EQUAL_TOKENS
from benchmarks.frontier.runs.records import by_task
from benchmarks.frontier.runs.tuning import ENVELOPE_KLS
from benchmarks.frontier.tasks.groups import LONG_PROMPTS, RETUNED
from fastp3o.evaluation.matched_kl import interval

LINES = {"reward": "-", "gold": "--"}


def envelope(study: Study, optimum: Optimum, path: Path) -> bool:
    """The share of the best gain at each KL where that is known, a line an algorithm, and elsewhere the gain."""
    arms = {(name, kl): tuned_arm(study, name, kl) for kl in ENVELOPE_KLS for name in EVERYONE}
    found = {
        (name, kl): (shares(study, optimum, arm, kl), study.gains(RETUNED, arm, kl, "reward"))
        for (name, kl), arm in arms.items()
        if arm is not None
    }
    found = {key: values for key, values in found.items() if values[1].count()}
    kls = [kl for kl in ENVELOPE_KLS if any(key[1] == kl for key in found)]
    if not kls:
        return False
    figure = Figure(figsize=(1.4 + 3.6 * len(kls), 4.8), layout="constrained")
    panels = figure.subplots(1, len(kls), squeeze=False, sharey=True)[0]
    names = [name for name in EVERYONE if any(key[0] == name for key in found)]
    for axes, kl in zip(panels, kls, strict=True):
        known = any(share.count() for (_, at), (share, _) in found.items() if at == kl)
        for place, name in enumerate(names):
            if (name, kl) in found:
                draw_seeds(axes, place, found[name, kl][0 if known else 1], name)
        axes.set_title(f"KL {kl:g}", fontsize=10)
        axes.set_xlabel("share of the best gain possible" if known else gain_label("proxy"))
    panels[0].set_yticks(range(len(names)), [NAMES[name] for name in names])
    panels[0].invert_yaxis()
    title = "Settings chosen for each KL: seeds, mean, and 95% interval where seeds are enough"
    finish(figure, panels, title, path)
    return True


def draw_seeds(axes: Axes, place: int, values: Series, name: str) -> None:
    values = values.dropna()
    if values.empty:
        return
    estimate = interval(by_task(values))
    look = {"color": LOOKS[name]["color"]}
    axes.plot(values, [place] * len(values), "o", markersize=3, alpha=0.35, markeredgewidth=0, **look)
    axes.errorbar(
        [estimate.mean], [place], xerr=bars([estimate[:3]]), marker=LOOKS[name]["marker"], markersize=6, **look
    )


def of_questions(study: Study, path: Path) -> bool:
    """The gain at the KL of each question over what it varies."""
    asked = [(question, drawn_points(study, question)) for question in questions.questions(study)]
    asked = [(question, points) for question, points in asked if points]
    if not asked:
        return False
    figure = Figure(figsize=(0.6 + 4.4 * len(asked), 4.6), layout="constrained")
    panels = figure.subplots(1, len(asked), squeeze=False)[0]
    for axes, (question, points) in zip(panels, asked, strict=True):
        draw_points(axes, points)
        axes.set(title=question.title, xlabel=question.varied, xscale="log", ylabel=f"gain at KL {question.kl:g}")
        values = sorted({value for _, _, value, _ in points})
        axes.set_xticks(values, [f"{value:,.7g}" for value in values])
        axes.minorticks_off()
    finish(figure, panels, "One setting at a time; solid: proxy, dashed: gold utility", path)
    return True


Drawn = tuple[str, str, float, Series]  # algorithm, outcome, value, gains


def drawn_points(study: Study, question: questions.Question) -> list[Drawn]:
    """Of the algorithms that have a gain at more than one value; of several rates at one value the first."""
    points: dict[tuple[str, float], questions.Point] = {}
    for point in question.points:
        points.setdefault((point.algorithm, point.value), point)
    found = [
        (point.algorithm, outcome, point.value, gains)
        for point in points.values()
        if point.arm is not None
        for outcome in OUTCOMES[RETUNED]
        if (gains := study.gains(point.group, point.arm, question.kl, outcome).dropna()).count() >= len(SEEDS) / 2
    ]
    several = {name for name, *_ in found if len({value for other, _, value, _ in found if other == name}) > 1}
    return [one for one in found if one[0] in several]


def draw_points(axes: Axes, points: list[Drawn]) -> None:
    for name in dict.fromkeys(name for name, *_ in points):
        look = LOOKS.get(name) or LOOKS[name.partition("-")[0]] | {"marker": "x"}
        for outcome, line in LINES.items():
            own = [
                (value, interval(by_task(gains)))
                for other, of, value, gains in points
                if (other, of) == (name, outcome)
            ]
            label = {"label": NAMES.get(name, name)} if outcome == "reward" else {}
            values, estimates = zip(*own, strict=True)
            means = [estimate.mean for estimate in estimates]
            errors = bars([estimate[:3] for estimate in estimates])
            axes.errorbar(values, means, yerr=errors, linestyle=line, markersize=4, linewidth=1.2, **label, **look)


def of_equal_cost(study: Study, path: Path) -> bool:
    """What each number of responses has reached, over tokens and over seconds, and gain over KL: a row an algorithm."""
    arms = equal_cost.arms(study)
    if not arms:
        return False
    rows = list(dict.fromkeys(arm.algorithm for arm in arms))
    figure = Figure(figsize=(13, 0.9 + 3.4 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 3, squeeze=False, sharex="col")
    for panels, algorithm in zip(grid, rows, strict=True):
        for arm in arms:
            if arm.algorithm == algorithm:
                draw_costs(panels, study, arm)
        panels[0].set_ylabel(f"{NAMES[algorithm]}: {equal_cost.BOUGHT['objective']}")
        panels[1].set_ylabel(equal_cost.BOUGHT["objective"])
        panels[2].set_ylabel(gain_label("proxy"))
    for axes, label in zip(grid[-1], ("computed tokens, millions", "seconds on one core", KL), strict=True):
        axes.set_xlabel(label)
    finish(figure, grid.ravel(), "Prompts of 122 tokens: K responses to each, as many tokens an update", path)
    return True


def draw_costs(panels: np.ndarray, study: Study, arm: equal_cost.Arm) -> None:
    """Means over seeds at each evaluated update."""
    runs = study.runs_of(LONG_PROMPTS, arm)
    means = equal_cost.evaluations(study, runs).groupby("step").mean(numeric_only=True)
    number = list(EQUAL_TOKENS).index(arm.responses_per_prompt)
    look = {"color": colormaps["viridis"](0.85 * number / (len(EQUAL_TOKENS) - 1)), "marker": "osD^"[number]}
    look |= {"markersize": 4, "linewidth": 1.4, "label": f"K {arm.responses_per_prompt} ({len(runs)} seeds)"}
    panels[0].plot(means["tokens"] / 1e6, means["objective"], **look)
    panels[1].plot(means["seconds"], means["objective"], **look)
    panels[2].plot(means["kl"], means["reward_gain"], **look)
