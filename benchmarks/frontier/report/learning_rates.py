"""Every learning rate that was tried, on the seeds that chose one and on those of the results."""

import numpy as np

from benchmarks.frontier import cells
from benchmarks.frontier.comparisons import matched_kls, reached
from benchmarks.frontier.plan import ALGORITHMS, LEARNING_RATES
from benchmarks.frontier.records import Arm, Study, by_seed, by_task, gains_at


def tried(study: Study, group: str, algorithm: str) -> list[float]:
    found = {run["learning_rate"] for run in study.runs if run["algorithm"] == algorithm}
    with_runs = [rate for rate in found if of_rate(study, group, algorithm, rate)]
    return sorted({*LEARNING_RATES[group], *with_runs})


def of_rate(study: Study, group: str, algorithm: str, rate: float) -> list:
    arm = Arm(algorithm, learning_rate=rate)
    return study.runs_of(group, arm) + study.runs_of(group, arm, selection=True)


def table(study: Study, group: str) -> list[list[str]]:
    """Proxy gains at matched KL; the chosen rate in bold. Header first. Other rates may not have run on all seeds."""
    kls = matched_kls(study, group)
    header = ["algorithm", "learning rate", "seeds of the", "seeds", "first KL", "final KL"]
    rows = [header + [f"gain at KL {kl:g}" for kl in kls]]
    arms = [(algorithm, "none", seeds) for algorithm in ALGORITHMS for seeds in ("selection", "results")]
    for algorithm, offset, seeds in [*arms, ("ppo", "unlearnable", "results")]:
        label = algorithm if offset == "none" else f"{algorithm}, {offset} offset"
        for rate in tried(study, group, algorithm):
            text = cells.rate(rate)
            chosen = f"**{text}**" if rate == study.rate(group, algorithm) else text
            runs = study.runs_of(group, Arm(algorithm, offset, rate), selection=seeds == "selection")
            if not runs and rate != study.rate(group, algorithm):
                continue
            final = cells.level({seed: run["evaluations"][-1]["kl"] for seed, run in by_seed(runs).items()})
            gains = [cells.level(gains_at(runs, kl, "reward")) for kl in kls]
            rows.append([label, chosen, seeds, str(len(runs)), cells.first_kl(runs), final, *gains])
    return rows


def spreads(study: Study, group: str) -> list[list[str]]:
    """How far mean gains lie apart: over the learning rates of an algorithm, and over algorithms at chosen rates.

    On the seeds of the results, among arms of which enough seeds reach the KL. Header first.
    """
    rows = [["KL", *ALGORITHMS, "algorithms"]]
    for kl in matched_kls(study, group):
        means = {
            (algorithm, rate): mean
            for algorithm in ALGORITHMS
            for rate in tried(study, group, algorithm)
            if (mean := mean_gain(study, group, Arm(algorithm, learning_rate=rate), kl)) is not None
        }
        of_rates = [apart([mean for (name, _), mean in means.items() if name == algorithm]) for algorithm in ALGORITHMS]
        chosen = [mean for (name, rate), mean in means.items() if rate == study.rate(group, name)]
        rows.append([f"{kl:g}", *of_rates, apart(chosen)])
    return rows


def mean_gain(study: Study, group: str, arm: Arm, kl: float) -> float | None:
    gains = gains_at(study.runs_of(group, arm), kl, "reward")
    return float(np.concatenate(by_task(gains)).mean()) if reached(gains) else None


def apart(means: list[float]) -> str:
    return cells.number(max(means) - min(means)) if len(means) > 1 else cells.NOT_MEASURED
