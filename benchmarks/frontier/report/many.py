"""The ten languages: arms by their measures, and paired differences between them.

Measures of a run, rewards in standard deviations:

    end, best    reward − BETA KL, which training maximises, after the last update and at the best evaluation
    gain, gold   of the learned reward and of the true utility at a KL of EQUAL_KL, NaN if it is not reached
    update       that reaches this KL
    final_kl     in nats per response
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from pandas import DataFrame

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.drawing import NAMES
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.runs.tuned_arms import RESULTS, rates_of, selection_runs
from fastp3o.evaluation.frontier import Evaluations
from fastp3o.evaluation.matched_kl import Estimate, Seed, gain_at_kl, interval, paired_difference

EQUAL_KL = 1.0
MEASURES = {
    "end": f"reward − {BETA:g} KL",
    "best": "at its best",
    "gain": f"gain at KL {EQUAL_KL:g}",
    "gold": "gold there",
    "update": "update there",
    "final_kl": "final KL",
}
# An arm's label -> a pair of arms whose difference it is.
Pairs = Mapping[tuple[str, ...], tuple[Run, Run]]


def measured(study: Study, arm: Run) -> DataFrame:
    """MEASURES of an arm's runs on the languages of the results, by seed."""
    rate = rate_of(study, arm)
    planned = [] if rate is None else [replace(arm, task=task, seed=seed, learning_rate=rate) for seed, task in RESULTS]
    return measures(study.records, planned)


def rate_of(study: Study, arm: Run) -> float | None:
    """The arm's own learning rate if it has one, otherwise the one that was chosen for it."""
    return arm.learning_rate or study.tuned_arms.get("rates", {}).get(arm.name)


def measures(records: Records, runs: Iterable[Run]) -> DataFrame:
    """By seed; runs that are not recorded are left out."""
    found = {run.seed: records.histories[run.name] for run in runs if run.name in records.histories}
    rows = {seed: measures_of(history) for seed, history in found.items()}
    return DataFrame.from_dict(rows, orient="index", columns=list(MEASURES))


def measures_of(history: Evaluations) -> dict[str, float | None]:
    objective = [one["objective"] for one in history]
    return {
        "end": objective[-1],
        "best": max(objective),
        "gain": gain_at_kl(history, EQUAL_KL),
        "gold": gain_at_kl(history, EQUAL_KL, "gold"),
        "update": gain_at_kl(history, EQUAL_KL, "step"),
        "final_kl": history[-1]["kl"],
    }


def name_of(arm: Run) -> str:
    """As in figures and tables: the algorithm with its own parameter."""
    return NAMES[arm.algorithm] + (f" {arm.own_parameter:g}" if arm.own_parameter else "")


def levels(study: Study, arms: Mapping[tuple[str, ...], Run], header: list[str]) -> list[list[str]]:
    """One line an arm, `header` naming the parts of its label. Header first."""
    lines = [[*header, "learning rate", *MEASURES.values()]]
    for label, arm in arms.items():
        found = measured(study, arm)
        lines.append([*label, cells.rate(rate_of(study, arm)), *(mean(found, name) for name in MEASURES)])
    return lines


def mean(found: DataFrame, measure: str) -> str:
    values = found[measure].dropna()
    if found.empty:
        return cells.NOT_MEASURED
    return cells.estimate(interval([list(values)])) if len(values) else cells.NOT_REACHED


def difference(study: Study, pair: tuple[Run, Run], measure: str, comparisons: int = 1) -> Estimate | None:
    """Over the languages on which both have it."""
    return paired_difference(*(by_seed(measured(study, arm), measure) for arm in pair), comparisons)


def by_seed(found: DataFrame, measure: str) -> dict[Seed, float]:
    """Languages are not strata: one more would be another of their kind, so intervals are over languages."""
    return {("", seed): float(value) for seed, value in found[measure].dropna().items()}


def differences(study: Study, pairs: Pairs, header: list[str]) -> tuple[list[list[str]], int]:
    """The table of the first three measures, header first, and its number of intervals."""
    judged = list(MEASURES)[:3]

    def found(count: int) -> cells.Differences:
        return {label: [difference(study, pair, measure, count) for measure in judged] for label, pair in pairs.items()}

    return cells.difference_table([*header, *(MEASURES[measure] for measure in judged)], found)


def trials(study: Study, arms: Mapping[tuple[str, ...], Run], header: list[str]) -> list[list[str]]:
    """Mean reward − BETA KL on the selection languages, at every rate. Header first."""
    lines = [[*header, "learning rates", f"reward − {BETA:g} KL of each"]]
    for label, arm in arms.items():
        found = {rate: measures(study.records, selection_runs(arm, rate))["end"] for rate in sorted(rates_of(arm))}
        ends = {rate: values.mean() for rate, values in found.items() if len(values)}
        if ends:
            lines.append([*label, ", ".join(map(cells.rate, ends)), ", ".join(map(cells.number, ends.values()))])
    return lines
