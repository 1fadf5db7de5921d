"""A real model and real people's choices: what each way to train ends at, and at which KL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.report.figures import COLORS, finish
from benchmarks.frontier.report.measures import Study, estimate, number
from benchmarks.frontier.runs.human_preferences import ARMS, COMPARED, OFFLINE, START, recorded
from fastp3o.evaluation.matched_kl import Seed, interval, paired_difference

Line = dict[str, Any]
BETA = 0.05
JOINT = next(iter(ARMS))
# What an end is judged by. The judge learned from other comparisons than the reward model.
MEASURES: dict[str, Callable[[Line], float]] = {
    "reward": lambda line: line["end"]["reward"],
    f"reward − {BETA:g} KL": lambda line: line["end"]["reward"] - BETA * line["end"]["kl"],
    "the judge": lambda line: line["end"]["gold"],
    "win rate by the judge": lambda line: line["end"]["gold/win_rate"],
}
MOVED: dict[str, Callable[[Line], float]] = {
    "KL": lambda line: line["end"]["kl"],
    "tokens": lambda line: line["end"]["response_length"],
}
LOOKS = {
    JOINT: ("joint", "o"),
    "P3O, separate": ("separate", "s"),
    COMPARED: ("joint", "^"),
    "PPO": ("ppo", "o"),
    "GRPO, k1": ("grpo-k1", "o"),
    "RLOO": ("rloo", "o"),
    "online DPO": ("dpo", "o"),
    OFFLINE: ("dpo", "s"),
}


def by_seed(arm: str, measure: Callable[[Line], float]) -> dict[Seed, float]:
    """Of an arm's lines at BETA, and of the start's."""
    return {
        ("", line["seed"]): measure(line)
        for line in recorded()
        if line["arm"] == arm and line["kl_coef"] == (0.0 if arm == START else BETA)
    }


def table() -> list[list[str]]:
    """A line an arm that has run, means over seeds. Header first."""
    measures = MEASURES | MOVED
    rows = [["trained by", "seeds", *measures]]
    for arm in (START, *ARMS):
        means = [interval(by_seed(arm, measure)) for measure in measures.values()]
        known = [one for one in means if one is not None]
        if known:
            rows.append([arm, str(known[0].count), *(number(one.mean) for one in known)])
    return rows


def differences() -> list[list[str]]:
    """A line an arm that has run on two seeds or more: joint P3O minus it, paired over seeds with
    Student's interval of 95%. Header first.
    """
    rows = [["joint P3O minus", *MEASURES]]
    for arm in ARMS:
        found = [
            paired_difference(by_seed(JOINT, measure), by_seed(arm, measure))
            for measure in MEASURES.values()
        ]
        if arm != JOINT and found[0] is not None and found[0].count > 1:
            rows.append([arm, *(estimate(one, signed=True) for one in found)])
    return rows


def figure(study: Study, path: Path) -> bool:
    """Writes an SVG of reward over KL, and of the judge's score over KL: a small mark a run, a
    large one an arm's mean. Returns False, and writes none, if nothing has run. study: of the
    languages, unused.
    """
    if not by_seed(JOINT, MEASURES["reward"]):
        return False
    page = Figure(figsize=(10, 4.6), layout="constrained")
    panels = page.subplots(1, 2)
    for axes, title in zip(panels, ("reward", "the judge"), strict=True):
        scatter(axes, MEASURES[title])
        axes.set(title=title, xlabel="KL to the start, nats a response")
    finish(page, panels, "Gemma 3 270M on people's choices: 8 updates, by algorithm", path)
    return True


def scatter(axes: Axes, measure: Callable[[Line], float]) -> None:
    started = list(by_seed(START, measure).values())
    height = sum(started) / len(started)
    axes.plot(0.0, height, "*", color="black", markersize=11, label=START)
    for arm, (color, marker) in LOOKS.items():
        reached = by_seed(arm, measure)
        if reached:
            moved = by_seed(arm, MOVED["KL"])
            points = [(moved[seed], value) for seed, value in reached.items()]
            means = [sum(values) / len(points) for values in zip(*points, strict=True)]
            look: dict[str, Any] = {"color": COLORS[color], "marker": marker, "linestyle": ""}
            axes.plot(*zip(*points, strict=True), markersize=3.5, alpha=0.55, **look)
            axes.plot(*means, markersize=9, markeredgecolor="black", label=arm, **look)
