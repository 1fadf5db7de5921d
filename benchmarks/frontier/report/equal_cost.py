"""More responses to fewer prompts, compared at equal cost: computed tokens, or seconds."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from pandas import DataFrame, Series

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.questions import question_arm
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study
from benchmarks.frontier.runs.questions import EQUAL_TOKENS, LONG_KL_COEF, MANY_RESPONSES
from benchmarks.frontier.runs.tuning import ENVELOPE_KLS
from benchmarks.frontier.tasks.groups import LONG_PROMPTS
from benchmarks.frontier.tasks.language import LONG_PROMPT
from fastp3o.evaluation.matched_kl import paired_difference

FEWEST = min(EQUAL_TOKENS)
COSTS = ("tokens", "seconds")
# Outcomes at equal cost: proxy gain less β KL, which training maximises, and the gain in utility.
BOUGHT = {"objective": "reward − β KL", "gold_gain": "gold gain"}


def arm_of(study: Study, algorithm: str, responses: int) -> Arm | None:
    """The algorithm at the rate that RETUNED chose for it; None if it has not run."""
    chosen = question_arm(study, algorithm)
    arm = chosen and Arm(algorithm, "none", chosen.learning_rate, LONG_KL_COEF, responses)
    return arm if arm and len(study.runs_of(LONG_PROMPTS, arm)) else None


def arms(study: Study) -> list[Arm]:
    found = [arm_of(study, name, responses) for name in MANY_RESPONSES for responses in EQUAL_TOKENS]
    return [arm for arm in found if arm]


def evaluations(study: Study, runs: DataFrame) -> DataFrame:
    """Evaluations of these runs, by name and update, with the `tokens` spent and `objective`, reward − β KL."""
    found = study.evaluations_of(runs).reset_index("step")
    prompts = runs.set_index("name")["prompts_per_update"].reindex(found.index)
    return found.assign(
        tokens=found["response_tokens"] + found["step"] * prompts * LONG_PROMPT,
        objective=found["reward_gain"] - LONG_KL_COEF * found["kl"],
    )


@lru_cache(maxsize=64)
def evaluations_by_run(study: Study, arm: Arm) -> dict[str, DataFrame]:
    return dict(list(evaluations(study, study.runs_of(LONG_PROMPTS, arm)).groupby(level="run")))


def at_cost(study: Study, arm: Arm, cost: str, spent: float, bought: str) -> Series:
    """The outcome `bought` of each run when it had spent this much, by task and seed; NaN if it never did."""
    runs, by_run = study.runs_of(LONG_PROMPTS, arm), evaluations_by_run(study, arm)
    found = [float(np.interp(spent, by_run[name][cost], by_run[name][bought], right=np.nan)) for name in runs["name"]]
    return Series(found, runs.index, dtype=float)


def budgets(study: Study, compared: Iterable[Arm]) -> dict[str, float]:
    """For each cost, the amount that every run of these arms has spent by its end. Empty without arms."""
    runs = [study.runs_of(LONG_PROMPTS, arm) for arm in compared]
    ends = [evaluations(study, some).groupby(level="run")[list(COSTS)].max() for some in runs]
    return {cost: min(end[cost].min() for end in ends) for cost in COSTS} if ends else {}


def table(study: Study) -> list[list[str]]:
    """Header first."""
    spent = budgets(study, arms(study))
    bought = [f"{name} after {written(cost, value)}" for cost, value in spent.items() for name in BOUGHT.values()]
    levels = [f"{name} at KL {kl:g}" for name in OUTCOMES[LONG_PROMPTS].values() for kl in ENVELOPE_KLS]
    header = ["algorithm", "learning rate", "K", "prompts", "seeds", "thousand tokens an update", "seconds an update"]
    lines = [[*header, "final KL", *levels, *bought]]
    for arm in arms(study):
        runs = study.runs_of(LONG_PROMPTS, arm)
        ends = evaluations(study, runs).groupby(level="run").last()
        a_step = [f"{(ends[cost] / ends['step']).mean() / unit:.{digits}f}" for cost, unit, digits in UNITS]
        about = [arm.algorithm, cells.rate(arm.learning_rate), str(arm.responses_per_prompt)]
        about += [str(EQUAL_TOKENS[arm.responses_per_prompt]), str(len(runs)), *a_step, cells.mean(runs["final_kl"])]
        gains = [
            cells.mean(study.gains(LONG_PROMPTS, arm, kl, outcome))
            for outcome in OUTCOMES[LONG_PROMPTS]
            for kl in ENVELOPE_KLS
        ]
        values = [
            cells.mean(at_cost(study, arm, cost, value, name)) for cost, value in spent.items() for name in BOUGHT
        ]
        lines.append([*about, *gains, *values])
    return lines


UNITS = (("tokens", 1000, 1), ("seconds", 1, 2))


def written(cost: str, value: float) -> str:
    return f"{value / 1000:.0f} thousand tokens" if cost == "tokens" else f"{value:.0f} s"


def more_responses(study: Study) -> dict[str, tuple[Arm, Arm]]:
    """Every algorithm with each K against 2, if both have run."""
    return {
        f"{arm.algorithm}: K {arm.responses_per_prompt} − K {FEWEST}": (arm, fewest)
        for arm in arms(study)
        if arm.responses_per_prompt > FEWEST and (fewest := arm_of(study, arm.algorithm, FEWEST))
    }


def rivals(study: Study) -> dict[str, tuple[Arm, Arm]]:
    """Pairs of algorithms with equally many responses that have run: P3O against the others, and P3O with one pass
    against RLOO.
    """
    pairs = [("joint", name) for name in MANY_RESPONSES if name != "joint"] + [("joint_once", "rloo")]
    return {
        f"{name} − {other}, K {responses}": (first, second)
        for name, other in pairs
        for responses in EQUAL_TOKENS
        if (first := arm_of(study, name, responses)) and (second := arm_of(study, other, responses))
    }


def differences(study: Study, pairs: dict[str, tuple[Arm, Arm]]) -> tuple[list[list[str]], int]:
    """The table of differences at equal KL and at the cost of the cheaper run's end, header first, and how many
    intervals hold together in it.
    """
    wanted = [
        *((kl, outcome) for outcome in OUTCOMES[LONG_PROMPTS] for kl in ENVELOPE_KLS),
        *((cost, name) for cost in COSTS for name in BOUGHT),
    ]

    def values(pair: tuple[Arm, Arm]) -> list[list[dict]]:
        spent = budgets(study, pair)
        return [
            [
                (
                    study.gains(LONG_PROMPTS, arm, at, what)
                    if isinstance(at, float)
                    else at_cost(study, arm, at, spent[at], what)
                )
                .dropna()
                .to_dict()
                for arm in pair
            ]
            for at, what in wanted
        ]

    found = {label: values(pair) for label, pair in pairs.items()}

    def widened(count: int) -> cells.Differences:
        return {(label,): [paired_difference(*one, count) for one in of_pair] for label, of_pair in found.items()}

    names = OUTCOMES[LONG_PROMPTS] | BOUGHT
    titles = [f"{names[what]} at {'equal ' + at if isinstance(at, str) else f'KL {at:g}'}" for at, what in wanted]
    return cells.difference_table(["difference", *titles], widened)
