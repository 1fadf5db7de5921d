"""Every algorithm at the setting that was chosen for a KL, over all learning rates and KL coefficients."""

from dataclasses import replace
from pathlib import Path

from pandas import DataFrame

from benchmarks.frontier.report import measures
from benchmarks.frontier.report.figures import Mark, Row, draw
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import equal_kl
from benchmarks.frontier.runs.plan import CLIPPINGS, Run
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.runs.stale import label
from benchmarks.frontier.runs.tuned_arms import RESULTS
from fastp3o.evaluation.matched_kl import Estimate, gain_at_kl, paired_difference

FIRST = ("joint", 0.0)
# Column of the evaluations -> its name. `step` is the update at which a run crosses the KL.
OUTCOMES = {"reward": "gain", "gold": "gold gain", "step": "update"}


def settings(study: Study) -> dict[tuple[float, tuple[str, float]], Run]:
    """What was chosen, by KL and algorithm with its own parameter; without those that reach a KL with no setting."""
    chosen = study.chosen.get("equal_kl", {})
    by_kl = {
        (kl, pair): chosen.get(label(*pair), {}).get(f"{kl:g}") for kl in equal_kl.KLS for pair in equal_kl.EVERYONE
    }
    return {key: Run(**found) for key, found in by_kl.items() if found}


def outcomes(records: Records, runs: list[Run], kl: float) -> DataFrame:
    """OUTCOMES of runs where they first cross a KL, by seed; NaN where `gain_at_kl` has none."""
    found = {run.seed: records.histories[run.name] for run in runs if run.name in records.histories}
    rows = {seed: {name: gain_at_kl(history, kl, name) for name in OUTCOMES} for seed, history in found.items()}
    return DataFrame.from_dict(rows, orient="index", columns=list(OUTCOMES), dtype=float)


def on_results(study: Study, one: Run, kl: float) -> DataFrame:
    return outcomes(study.records, [replace(one, task=task, seed=seed) for seed, task in RESULTS], kl)


def difference(study: Study, kl: float, pair: tuple[Run, Run], outcome: str) -> Estimate | None:
    """Over the languages on which both reach the KL."""
    return paired_difference(*(measures.by_seed(on_results(study, one, kl), outcome) for one in pair))


def differences(study: Study) -> list[list[str]]:
    """Joint P3O minus every other algorithm. Header first."""
    arms, lines = settings(study), [["KL", "joint P3O minus", "setting", *OUTCOMES.values()]]
    for (kl, pair), one in arms.items():
        if pair != FIRST and (kl, FIRST) in arms:
            found = [difference(study, kl, (arms[kl, FIRST], one), name) for name in OUTCOMES]
            shown = [measures.estimate(estimate, signed=True) for estimate in found]
            lines.append([f"{kl:g}", measures.name_of(one), measures.described(one), *shown])
    return lines


def best_rival(study: Study, kl: float) -> tuple[str, Estimate | None]:
    """The rival with the highest mean gain on the languages of the results, and joint P3O's paired difference to it.

    Rivals are not P3O, and reach the KL on more than half of the languages.
    """
    arms = settings(study)
    rivals = [one for (at, pair), one in arms.items() if at == kl and pair[0] not in CLIPPINGS]
    gains = {one: on_results(study, one, kl)["reward"].dropna() for one in rivals}
    known = {one: found.mean() for one, found in gains.items() if len(found) > len(RESULTS) / 2}
    if not known or (kl, FIRST) not in arms:
        return "", None
    best = max(known, key=known.__getitem__)
    return measures.name_of(best), difference(study, kl, (arms[kl, FIRST], best), "reward")


MARKS = {"reward": Mark("o", "learned reward"), "gold": Mark("D", "true utility", filled=False)}


def figure(study: Study, path: Path) -> bool:
    """Every algorithm's paired differences to joint P3O at each KL."""
    arms, panels = settings(study), {}
    for kl in equal_kl.KLS:
        if (kl, FIRST) not in arms:
            return False
        compared = [one for (at, pair), one in arms.items() if at == kl and pair != FIRST]
        panels[f"gain at KL {kl:g}"] = [
            Row(one, {name: difference(study, kl, (one, arms[kl, FIRST]), name) for name in MARKS}) for one in compared
        ]
    title = "Every algorithm over all rates and KL coefficients: paired differences on eight languages"
    return draw(panels, MARKS, minus="joint P3O", title=title, path=path)
