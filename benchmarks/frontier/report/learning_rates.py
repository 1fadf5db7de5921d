"""Every learning rate that was tried, on the seeds that chose one and on those of the results."""

import math

from pandas import DataFrame, Series

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.comparisons import matched_kls, reached
from benchmarks.frontier.report.study import Arm, Study
from benchmarks.frontier.runs.plan import ALGORITHMS, LEARNING_RATES


def rates_tried(study: Study, group: str, algorithm: str) -> list[float]:
    runs = study.records.runs
    found = runs.loc[(runs["group"] == group) & (runs["algorithm"] == algorithm), "learning_rate"]
    return sorted({*LEARNING_RATES[group], *found})


def table(study: Study, group: str) -> list[list[str]]:
    """Proxy gains at equal KL, the chosen rate in bold; others may not have run on all seeds. Header first."""
    kls = matched_kls(study, group)
    header = ["algorithm", "learning rate", "seeds of the", "seeds", "first KL", "final KL"]
    lines = [header + [f"gain at KL {kl:g}" for kl in kls]]
    arms = [(algorithm, "none", seeds) for algorithm in ALGORITHMS for seeds in ("selection", "results")]
    for algorithm, offset, seeds in [*arms, ("ppo", "unlearnable", "results")]:
        label = algorithm if offset == "none" else f"{algorithm}, {offset} offset"
        for rate in rates_tried(study, group, algorithm):
            runs = study.runs_of(group, Arm(algorithm, offset, rate), selection=seeds == "selection")
            chosen = rate == study.chosen_rate(group, algorithm)
            if runs.empty and not chosen:
                continue
            text = f"**{cells.rate(rate)}**" if chosen else cells.rate(rate)
            ends = [cells.extent(runs["first_kl"]), cells.mean(runs["final_kl"])]
            gains = [cells.mean(study.records.at_kl(runs, kl, "reward")) for kl in kls]
            lines.append([label, text, seeds, str(len(runs)), *ends, *gains])
    return lines


def spreads(study: Study, group: str) -> list[list[str]]:
    """The range of mean gains over the learning rates of an algorithm, and over algorithms at their chosen rates.

    Only arms of which enough seeds of the results reach the KL count. Header first.
    """
    lines = [["KL", *ALGORITHMS, "algorithms"]]
    for kl in matched_kls(study, group):
        means = mean_gains(study, group, kl)
        chosen = Series({name: means[name].get(study.chosen_rate(group, name)) for name in ALGORITHMS}, dtype=float)
        lines.append([f"{kl:g}", *(spread(means[name]) for name in ALGORITHMS), spread(chosen)])
    return lines


def mean_gains(study: Study, group: str, kl: float) -> DataFrame:
    """Mean proxy gains by learning rate and algorithm; NaN if too few seeds reach the KL."""

    def mean_gain(algorithm: str, rate: float) -> float:
        gains = study.gains(group, Arm(algorithm, learning_rate=rate), kl, "reward")
        return gains.mean() if reached(gains) else math.nan

    return DataFrame(
        {name: {rate: mean_gain(name, rate) for rate in rates_tried(study, group, name)} for name in ALGORITHMS}
    )


def spread(means: Series) -> str:
    return cells.number(means.max() - means.min()) if means.count() > 1 else cells.NOT_MEASURED
