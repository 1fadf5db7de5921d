"""Every algorithm at the settings that the selection seeds chose for a KL, and how much of the best gain it gets."""

import numpy as np
from pandas import DataFrame, Series

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.comparisons import Comparison, difference
from benchmarks.frontier.report.sanity import Optimum, known_points
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study
from benchmarks.frontier.runs.plan import EVERYONE, KL_COEFS, PUBLISHED
from benchmarks.frontier.runs.tuning import BY_GROUPS, ENVELOPE_KLS, OWN_TRIALS, QUESTIONS_KL, TRIAL_RATES
from benchmarks.frontier.tasks.groups import RETUNED

FIRST = "joint"


def tuned_arm(study: Study, algorithm: str, kl: float) -> Arm | None:
    """The algorithm with the setting that was chosen for the KL, None if none was chosen."""
    setting = study.tuned.get(RETUNED, {}).get("settings", {}).get(algorithm, {}).get(f"{kl:g}")
    return setting and Arm(algorithm, **setting, responses_per_prompt=usual_responses(algorithm))


def usual_responses(algorithm: str) -> int:
    """Responses per prompt in the runs of `tuning.run_with`."""
    return 4 if algorithm in BY_GROUPS else 2


def shares(study: Study, optimum: Optimum, arm: Arm, kl: float) -> Series:
    """Proxy gain at a KL over the best gain there, by task and seed; NaN if the best gain is not known."""
    gains = study.gains(RETUNED, arm, kl, "reward")
    best = {task: best_gain(points, kl) for task, points in known_points(optimum).groupby("task")}
    return gains / Series([best.get(task, np.nan) for task, _ in gains.index], gains.index, dtype=float)


def best_gain(points: DataFrame, kl: float) -> float:
    """The best gain at a KL on one task; NaN beyond the known points."""
    return float(np.interp(kl, points["kl"], points["reward_gain"], left=np.nan, right=np.nan))


def table(study: Study, optimum: Optimum) -> list[list[str]]:
    """Header first. `update`: where the run first crosses the KL."""
    header = ["KL", "algorithm", "K", "own parameter", "learning rate", "KL coefficient", "seeds"]
    lines = [[*header, "update", "gain, proxy", "gain, gold", "share of the optimum"]]
    for kl in ENVELOPE_KLS:
        for algorithm in EVERYONE:
            arm = tuned_arm(study, algorithm, kl)
            if arm is None:
                lines.append([f"{kl:g}", algorithm, *[""] * 4, "0", *[cells.NOT_MEASURED] * 4])
                continue
            gains = [cells.mean(study.gains(RETUNED, arm, kl, outcome)) for outcome in OUTCOMES[RETUNED]]
            runs = study.runs_of(RETUNED, arm)
            about = [f"{kl:g}", algorithm, str(arm.responses_per_prompt), own(arm), cells.rate(arm.learning_rate)]
            found = shares(study, optimum, arm, kl)
            share = "not known" if len(found) and found.isna().all() else cells.mean(found)
            update = cells.mean(study.records.at_kl(runs, kl, "step"))
            lines.append([*about, f"{arm.kl_coef:g}", str(len(runs)), update, *gains, share])
    return lines


def own(arm: Arm) -> str:
    return f"{arm.own_parameter:g}" if arm.own_parameter else ""


def comparisons(study: Study) -> list[tuple[Comparison, float]]:
    """Joint clipping against every other algorithm at each KL, with the settings that were chosen for it."""
    found = []
    for kl in ENVELOPE_KLS:
        first = tuned_arm(study, FIRST, kl)
        for algorithm in EVERYONE:
            second = tuned_arm(study, algorithm, kl)
            if algorithm != FIRST and first and second:
                found.append((Comparison(f"{FIRST} − {algorithm}", first, second), kl))
    return found


def differences(study: Study) -> tuple[list[list[str]], int]:
    """The table of paired differences, header first, and how many intervals hold together in it."""

    def found(count: int) -> cells.Differences:
        return {
            (f"{kl:g}", comparison.label): [
                difference(study, RETUNED, comparison, kl, outcome, count) for outcome in OUTCOMES[RETUNED]
            ]
            for comparison, kl in comparisons(study)
        }

    header = ["KL", "difference", *(f"gain, {name}" for name in OUTCOMES[RETUNED].values())]
    return cells.difference_table(header, found)


def in_fours(study: Study) -> list[list[str]]:
    """Published algorithms with four responses to half as many prompts, at their setting for one KL. Header first."""
    lines = [["algorithm", "seeds", *(f"{name} at KL {QUESTIONS_KL:g}" for name in OUTCOMES[RETUNED].values())]]
    for algorithm in PUBLISHED:
        arm = tuned_arm(study, algorithm, QUESTIONS_KL)
        if arm is None:
            continue
        arm = arm._replace(responses_per_prompt=4)
        gains = [cells.mean(study.gains(RETUNED, arm, QUESTIONS_KL, outcome)) for outcome in OUTCOMES[RETUNED]]
        lines.append([algorithm, str(len(study.runs_of(RETUNED, arm))), *gains])
    return lines


def trials(study: Study) -> list[list[str]]:
    """Proxy gains of every setting that ran on the selection seeds. Header first."""
    header = ["algorithm", "K", "own parameter", "learning rate", "KL coefficient", "seeds", "first KL", "final KL"]
    lines = [header + [f"gain at KL {kl:g}" for kl in ENVELOPE_KLS]]
    for algorithm in EVERYONE:
        for arm in tried(study, algorithm):
            runs = study.runs_of(RETUNED, arm, selection=True)
            gains = [cells.mean(study.records.at_kl(runs, kl, "reward")) for kl in ENVELOPE_KLS]
            about = [str(arm.responses_per_prompt), own(arm), cells.rate(arm.learning_rate), f"{arm.kl_coef:g}"]
            ends = [str(len(runs)), cells.extent(runs["first_kl"]), cells.mean(runs["final_kl"])]
            lines.append([algorithm, *about, *ends, *gains])
    return lines


def tried(study: Study, algorithm: str) -> list[Arm]:
    """The settings of an algorithm that ran on the selection seeds, with its usual number of responses."""
    runs = study.records.runs
    rates = {*runs.loc[runs["algorithm"] == algorithm, "learning_rate"], *TRIAL_RATES[algorithm]}
    arms = [
        Arm(algorithm, "none", rate, kl_coef, usual_responses(algorithm), own_parameter)
        for own_parameter in OWN_TRIALS.get(algorithm, (0.0,))
        for rate in sorted(rates)
        for kl_coef in KL_COEFS[algorithm]
    ]
    return [arm for arm in arms if len(study.runs_of(RETUNED, arm, selection=True))]


def slowness(study: Study, kl: float) -> str:
    """How well the update at which trials cross a KL ranks their gains there: `correlation (settings)`."""
    points = []
    for algorithm in EVERYONE:
        for arm in tried(study, algorithm):
            runs = study.runs_of(RETUNED, arm, selection=True)
            update, gain = (study.records.at_kl(runs, kl, column).mean(skipna=False) for column in ("step", "reward"))
            points.append((update, gain))
    ranks = DataFrame(points, columns=["update", "gain"]).dropna().rank()
    return (
        f"{cells.number(ranks['update'].corr(ranks['gain']))} ({len(ranks)})" if len(ranks) > 2 else cells.NOT_MEASURED
    )
