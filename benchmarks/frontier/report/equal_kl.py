"""Every algorithm at the setting that was chosen for a KL, over all learning rates and KL coefficients."""

from dataclasses import replace
from pathlib import Path

from pandas import DataFrame

from benchmarks.frontier.report import cells, many
from benchmarks.frontier.report.rows import Mark, Row, draw
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs import equal_kl
from benchmarks.frontier.runs.plan import CLIPPINGS, Run
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.runs.stale import label
from benchmarks.frontier.runs.tuned_arms import RESULTS, selection_runs
from benchmarks.frontier.tasks.groups import MANY_LANGUAGES
from benchmarks.frontier.tasks.task import TASK_SETTINGS
from fastp3o.evaluation.matched_kl import Estimate, gain_at_kl, paired_difference

FIRST = ("joint", 0.0)
# Column of the evaluations -> its name. `step` is the update at which a run crosses the KL.
OUTCOMES = {"reward": "gain", "gold": "gold gain", "step": "update"}
GAINS = ("reward", "gold")
USUAL_UPDATES = TASK_SETTINGS[MANY_LANGUAGES]["updates"]


def chosen(study: Study, pair: tuple[str, float], kl: float) -> Run | None:
    """An algorithm with the setting that was chosen for a KL; None if it reaches it with no setting."""
    found = study.tuned_arms.get("equal_kl", {}).get(label(*pair), {}).get(f"{kl:g}")
    return found and Run(**found)


def settings(study: Study) -> dict[tuple[float, tuple[str, float]], Run]:
    """What was chosen, by KL and algorithm with its own parameter."""
    return {(kl, pair): one for kl in equal_kl.KLS for pair in equal_kl.EVERYONE if (one := chosen(study, pair, kl))}


def outcomes(records: Records, runs: list[Run], kl: float) -> DataFrame:
    """OUTCOMES of runs where they first cross a KL, by seed; NaN for one that does not, or does before its first
    evaluation after the start.
    """
    found = {run.seed: records.histories[run.name] for run in runs if run.name in records.histories}
    rows = {seed: {name: gain_at_kl(history, kl, name) for name in OUTCOMES} for seed, history in found.items()}
    return DataFrame.from_dict(rows, orient="index", columns=list(OUTCOMES), dtype=float)


def on_results(study: Study, one: Run, kl: float) -> DataFrame:
    return outcomes(study.records, [replace(one, task=task, seed=seed) for seed, task in RESULTS], kl)


def levels(study: Study) -> list[list[str]]:
    """Header first."""
    lines = [["KL", "algorithm", "learning rate", "KL coefficient", "updates", *OUTCOMES.values()]]
    for (kl, _), one in settings(study).items():
        found = on_results(study, one, kl)
        about = [f"{kl:g}", many.name_of(one), *about_setting(one)]
        lines.append([*about, *(many.mean(found, name) for name in OUTCOMES)])
    return lines


def about_setting(one: Run) -> list[str]:
    return [cells.rate(one.learning_rate), f"{one.kl_coef:g}", str(one.updates or USUAL_UPDATES)]


def difference(study: Study, kl: float, pair: tuple[Run, Run], outcome: str, comparisons: int = 1) -> Estimate | None:
    """Over the languages on which both reach the KL."""
    return paired_difference(*(many.by_seed(on_results(study, one, kl), outcome) for one in pair), comparisons)


def differences(study: Study) -> tuple[list[list[str]], int]:
    """Joint P3O minus every other algorithm. Header first, then the number of intervals."""
    arms = settings(study)
    pairs = {
        (f"{kl:g}", many.name_of(one)): (kl, (arms[kl, FIRST], one))
        for (kl, pair), one in arms.items()
        if pair != FIRST and (kl, FIRST) in arms
    }

    def found(count: int) -> cells.Differences:
        return {
            key: [difference(study, kl, two, outcome, count) for outcome in GAINS] for key, (kl, two) in pairs.items()
        }

    return cells.difference_table(["KL", "joint P3O minus", *(OUTCOMES[name] for name in GAINS)], found)


def trials(study: Study) -> list[list[str]]:
    """Mean gain and update at each KL of every setting on the selection languages. Header first."""
    at = [f"{name} at KL {kl:g}" for kl in equal_kl.KLS for name in ("gain", "update")]
    lines = [["algorithm", "learning rate", "KL coefficient", "updates", *at]]
    for pair in equal_kl.EVERYONE:
        for usual in equal_kl.settings(*pair):
            for one in (usual, replace(usual, updates=equal_kl.MORE_UPDATES)):
                runs = selection_runs(one, one.learning_rate)
                found = [outcomes(study.records, runs, kl) for kl in equal_kl.KLS]
                if all(len(rows) == len(runs) for rows in found):
                    values = [rows[name].mean(skipna=False) for rows in found for name in ("reward", "step")]
                    shown = [cells.NOT_REACHED if value != value else cells.number(value) for value in values]
                    lines.append([many.name_of(one), *about_setting(one), *shown])
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
    return many.name_of(best), difference(study, kl, (arms[kl, FIRST], best), "reward")


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
