"""Figures of the second comparison: every algorithm tuned, one setting at a time, and K at equal cost.

Every function returns False, and writes nothing, if its runs have not been made.
"""

from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pandas import Series

from benchmarks.frontier.report import equal_cost, questions
from benchmarks.frontier.report.drawing import LOOKS, NAMES, bars, finish, gain_label
from benchmarks.frontier.report.envelope import shares, tuned_arm
from benchmarks.frontier.report.sanity import Optimum
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs.plan import EVERYONE, SEEDS
from benchmarks.frontier.runs.questions import EQUAL_TOKENS
from benchmarks.frontier.runs.records import by_task
from benchmarks.frontier.runs.tuning import ENVELOPE_KLS
from benchmarks.frontier.tasks.groups import LONG_PROMPTS, RETUNED
from fastp3o.evaluation.matched_kl import interval

WITHDRAWN = "rloo"  # its rate was not tried fairly, so gains at equal KL do not rank it: two_languages.md


def envelope(study: Study, optimum: Optimum, path: Path) -> bool:
    """The share of the best gain at each KL where that is known, a line an algorithm, and elsewhere the gain."""
    arms = {(name, kl): tuned_arm(study, name, kl) for kl in ENVELOPE_KLS for name in EVERYONE if name != WITHDRAWN}
    found = {
        (name, kl): (shares(study, optimum, arm, kl), study.gains(RETUNED, arm, kl, "reward"))
        for (name, kl), arm in arms.items()
        if arm is not None
    }
    found = {key: values for key, values in found.items() if values[1].count()}
    kls = [kl for kl in ENVELOPE_KLS if any(key[1] == kl for key in found)]
    if not kls:
        return False
    figure = Figure(figsize=(1.4 + 3.9 * len(kls), 4.6), layout="constrained")
    panels = figure.subplots(1, len(kls), squeeze=False, sharey=True)[0]
    names = [name for name in EVERYONE if any(key[0] == name for key in found)]
    for axes, kl in zip(panels, kls, strict=True):
        known = any(share.count() for (_, at), (share, _) in found.items() if at == kl)
        for place, name in enumerate(names):
            if (name, kl) in found:
                draw_seeds(axes, place, found[name, kl][0 if known else 1], name)
        axes.set_title(f"at KL {kl:g}", fontsize=10)
        axes.set_xlabel("share of the best gain possible" if known else gain_label("proxy"))
    panels[0].set_yticks(range(len(names)), [NAMES[name] for name in names])
    panels[0].invert_yaxis()
    finish(figure, panels, "Every algorithm tuned for each KL: seeds, mean and its 95% interval", path)
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


class Drawn(NamedTuple):
    """The gains of an algorithm, by task and seed, at one value of what a question varies."""

    algorithm: str
    value: float
    gains: Series


def one_setting_at_a_time(study: Study, path: Path) -> bool:
    """The gain at the KL of each question over what it varies."""
    asked = [(question, drawn_points(study, question)) for question in questions.questions(study)]
    asked = [(question, points) for question, points in asked if points]
    if not asked:
        return False
    figure = Figure(figsize=(10, 1 + 3.6 * ((len(asked) + 1) // 2)), layout="constrained")
    panels = figure.subplots((len(asked) + 1) // 2, 2, squeeze=False).ravel()
    for axes, (question, points) in zip(panels, asked, strict=False):
        draw_points(axes, points)
        name = {"reward": "proxy", "gold": "true utility"}[question.outcome]
        axes.set(
            title=question.title, xlabel=question.varied, xscale="log", ylabel=f"gain at KL {question.kl:g}, {name}"
        )
        values = sorted({point.value for point in points})
        axes.set_xticks(values, [f"{value:,.7g}" for value in values])
        axes.minorticks_off()
    for axes in panels[len(asked) :]:
        axes.remove()
    finish(
        figure, panels[: len(asked)], "One setting at a time, from each algorithm's own: mean and 95% interval", path
    )
    return True


def drawn_points(study: Study, question: questions.Question) -> list[Drawn]:
    """The algorithms with a gain at two values or more; of several rates at one value the first."""
    points: dict[tuple[str, float], questions.Point] = {}
    for point in question.points:
        points.setdefault((point.algorithm, point.value), point)
    found = [
        Drawn(point.algorithm, point.value, gains)
        for point in points.values()
        if point.arm is not None and point.algorithm != WITHDRAWN
        if (gains := study.gains(point.group, point.arm, question.kl, question.outcome).dropna()).count()
        >= len(SEEDS) / 2
    ]
    several = {
        one.algorithm for one in found if any(one.algorithm == o.algorithm and one.value != o.value for o in found)
    }
    return [one for one in found if one.algorithm in several]


def draw_points(axes: Axes, points: list[Drawn]) -> None:
    """A line an algorithm; each a little beside the others, so that no interval hides another."""
    names = list(dict.fromkeys(point.algorithm for point in points))
    for place, name in enumerate(names):
        own = [(point.value, interval(by_task(point.gains))) for point in points if point.algorithm == name]
        draw_line(axes, own, name, 1.03 ** (place - (len(names) - 1) / 2))


def draw_line(axes: Axes, points: list[tuple[float, tuple]], name: str, shift: float) -> None:
    values, estimates = zip(*points, strict=True)
    means = [estimate[0] for estimate in estimates]
    errors = bars([estimate[:3] for estimate in estimates])
    look = LOOKS[name] | {"markersize": 5, "linewidth": 1.5, "elinewidth": 1, "label": NAMES[name]}
    axes.errorbar([value * shift for value in values], means, yerr=errors, **look)


def by_responses(study: Study, path: Path) -> bool:
    """Over K: reward − β KL after equal tokens and after equal seconds, and the gain at equal KL."""
    arms = equal_cost.arms(study)
    if not arms:
        return False
    spent = equal_cost.budgets(study, arms)
    figure = Figure(figsize=(12, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    names = list(dict.fromkeys(arm.algorithm for arm in arms))
    for axes, cost in zip(panels, (*equal_cost.COSTS, None), strict=True):
        for place, name in enumerate(names):
            if cost is None and name == WITHDRAWN:
                continue
            found = {
                arm.responses_per_prompt: (
                    equal_cost.at_cost(study, arm, cost, spent[cost], "objective")
                    if cost
                    else study.gains(LONG_PROMPTS, arm, ENVELOPE_KLS[0], "reward")
                ).dropna()
                for arm in arms
                if arm.algorithm == name
            }
            points = [(float(k), interval(by_task(values))) for k, values in found.items() if len(values)]
            if points:
                draw_line(axes, points, name, 1.025 ** (place - (len(names) - 1) / 2))
        axes.set(xscale="log", xlabel="K, responses per prompt")
        axes.set_xticks(list(EQUAL_TOKENS), [str(responses) for responses in EQUAL_TOKENS])
        axes.minorticks_off()
        title = f"reward − β KL after {equal_cost.written(cost, spent[cost])}" if cost else "gain at KL 1, proxy"
        axes.set_title(title, fontsize=10)
    panels[0].set_ylabel("standard deviations of the reward")
    finish(figure, panels, "Long prompts: more responses to fewer prompts, equally many tokens an update", path)
    return True
