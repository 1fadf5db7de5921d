"""A real model's tasks: where each way to train ends, and at which KL."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.frontier.report.figures import COLORS, finish
from benchmarks.frontier.report.measures import Study, estimate, number
from benchmarks.frontier.runs.real_model import ARMS, COMPARED, OFFLINE, START, TASKS, recorded
from fastp3o.evaluation.matched_kl import Seed, interval, paired_difference

Line = dict[str, Any]
BETA = 0.05
JOINT = next(iter(ARMS))
# What an end is judged by. The gold has learned from other data than the reward model.
MEASURES: dict[str, Callable[[Line], float]] = {
    "reward": lambda line: line["end"]["reward"],
    f"reward − {BETA:g} KL": lambda line: line["end"]["reward"] - BETA * line["end"]["kl"],
    "gold": lambda line: line["end"]["gold"],
    "win rate by the gold": lambda line: line["end"]["gold/win_rate"],
}
MOVED: dict[str, Callable[[Line], float]] = {
    "KL": lambda line: line["end"]["kl"],
    "tokens": lambda line: line["end"]["response_length"],
}
TITLES = {"human_preferences": "People's choices", "film_reviews": "Film reviews"}
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


def by_seed(task: str, arm: str, measure: Callable[[Line], float]) -> dict[Seed, float]:
    """Of an arm's lines at BETA, or of the start's."""
    kl_coef = 0.0 if arm == START else BETA
    return {
        ("", line["seed"]): measure(line)
        for line in recorded(task)
        if (line["arm"], line["kl_coef"]) == (arm, kl_coef)
    }


def table(task: str) -> list[list[str]]:
    """A line an arm that has run, means over seeds. Header first."""
    measures = MEASURES | MOVED
    rows = [["trained by", "seeds", *measures]]
    for arm in (START, *ARMS):
        means = [interval(by_seed(task, arm, measure)) for measure in measures.values()]
        known = [one for one in means if one is not None]
        if known:
            rows.append([arm, str(known[0].count), *(number(one.mean) for one in known)])
    return rows


def differences(task: str) -> list[list[str]]:
    """A line an arm that has run on three seeds or more: joint P3O minus it, paired over seeds with
    Student's interval of 95%. Header first.
    """
    rows = [["joint P3O minus", *MEASURES]]
    for arm in ARMS:
        found = [
            paired_difference(by_seed(task, JOINT, measure), by_seed(task, arm, measure))
            for measure in MEASURES.values()
        ]
        if arm != JOINT and found[0] is not None and found[0].count > 2:
            rows.append([arm, *(estimate(one, signed=True) for one in found)])
    return rows


def figure(study: Study, path: Path) -> bool:
    """Writes an SVG of reward and gold over KL, a row a task: a small mark a run, a large one an
    arm's mean. Returns False, and writes none, if nothing has run. study: of the languages, unused.
    """
    tasks = [task for task in TASKS if by_seed(task, JOINT, MEASURES["reward"])]
    if not tasks:
        return False
    page = Figure(figsize=(10, 1.2 + 3.6 * len(tasks)), layout="constrained")
    panels = page.subplots(len(tasks), 2, squeeze=False)
    for task, row in zip(tasks, panels, strict=True):
        for axes, name in zip(row, ("reward", "gold"), strict=True):
            scatter(axes, task, MEASURES[name])
            axes.set(title=f"{TITLES[task]}: {name}", xlabel="KL to the start, nats a response")
    finish(page, list(panels.flat), "Gemma 3 270M, 8 updates of 16 responses, by algorithm", path)
    return True


def scatter(axes: Axes, task: str, measure: Callable[[Line], float]) -> None:
    started = list(by_seed(task, START, measure).values())
    height = sum(started) / len(started)
    axes.plot(0.0, height, "*", color="black", markersize=11, label=START)
    for arm, (color, marker) in LOOKS.items():
        reached = by_seed(task, arm, measure)
        if reached:
            moved = by_seed(task, arm, MOVED["KL"])
            points = [(moved[seed], value) for seed, value in reached.items()]
            means = [sum(values) / len(points) for values in zip(*points, strict=True)]
            look: dict[str, Any] = {"color": COLORS[color], "marker": marker, "linestyle": ""}
            axes.plot(*zip(*points, strict=True), markersize=3.5, alpha=0.55, **look)
            axes.plot(*means, markersize=9, markeredgecolor="black", label=arm, **look)
