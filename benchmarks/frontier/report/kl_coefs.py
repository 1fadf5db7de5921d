"""The KL coefficient as a factor of its own: gains at several KLs against β, from the trials of all settings."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.frontier.report.figures import COLORS, finish
from benchmarks.frontier.report.measures import NAMES, Study
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.runs.tuned_arms import SELECTION
from fastp3o.evaluation.matched_kl import gain_at_kl

KLS = (1.0, 2.0, 4.0)
ALGORITHMS = ("joint", "ppo", "rloo", "rebel", "dpo")
OWN = {"rebel": 3.0}
# Fields of the trials; rates, coefficients and numbers of updates differ.
PLAIN = {"responses_per_prompt": 4, "offset": "none", "reward_factor": 1.0, "rounds_ahead": 0, "inner_epochs": 0}
PLAIN |= {"reward_spread": 0.0, "critic_learning_rate": 0.0, "value_clip_range": 0.0}


def gains(records: Records, algorithm: str, kl: float) -> Mapping[float, float]:
    """The mean gain of both languages that choose, at the best learning rate and number of updates, by β. A β with
    which no setting has a gain on both is left out.
    """
    runs = records.runs
    wanted = PLAIN | {"algorithm": algorithm, "own_parameter": OWN.get(algorithm, 0.0)}
    for name, value in wanted.items():
        runs = runs[runs[name] == value]
    found: dict[float, float] = {}
    for (beta, _, _), ran in runs.groupby(["kl_coef", "learning_rate", "updates"]):
        by_task = ran.set_index(["seed", "task"])["name"]
        reached = [gain_at_kl(records.histories[by_task[one]], kl) for one in SELECTION if one in by_task.index]
        if len(reached) == len(SELECTION) and None not in reached:
            found[beta] = max(found.get(beta, 0.0), sum(reached) / len(reached))
    return found


def table(study: Study) -> list[list[str]]:
    """A line an algorithm and β, a column a KL. Header first."""
    lines = [["algorithm", "β", *(f"gain at KL {kl:g}" for kl in KLS)]]
    for algorithm in ALGORITHMS:
        columns = [gains(study.records, algorithm, kl) for kl in KLS]
        for beta in sorted({beta for column in columns for beta in column}):
            cells = [f"{column[beta]:.2f}" if beta in column else "–" for column in columns]
            lines.append([NAMES[algorithm], f"{beta:g}", *cells])
    return lines


def figure(study: Study, path: Path) -> bool:
    """A panel a KL, a line an algorithm."""
    page = Figure(figsize=(10, 3.2), layout="constrained")
    panels = page.subplots(1, len(KLS), sharey=True, sharex=True)
    for axes, kl in zip(panels, KLS, strict=True):
        for algorithm in ALGORITHMS:
            found = sorted(gains(study.records, algorithm, kl).items())
            if found:
                look = {"marker": "o", "color": COLORS[algorithm], "label": NAMES[algorithm]}
                axes.plot(*zip(*found, strict=True), **look)
        axes.set(xscale="log", xlabel="β", title=f"gain at KL {kl:g}")
    finish(page, panels, "Gain at equal KL against β, the best of all rates: two languages", path)
    return True
