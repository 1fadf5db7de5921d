"""More responses to fewer prompts, compared where runs had cost the same: in computed tokens, and in seconds."""

from collections.abc import Iterable

import numpy as np
from pandas import DataFrame, Series

from benchmarks.frontier.report import cells, together
from benchmarks.frontier.report.questions import question_arm
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study
from benchmarks.frontier.runs.questions import EQUAL_TOKENS, LONG_KL_COEF, MANY_RESPONSES, RATE_FACTORS
from benchmarks.frontier.runs.tuning import ENVELOPE_KLS
from benchmarks.frontier.tasks.groups import LONG_PROMPTS
from benchmarks.frontier.tasks.language import LONG_PROMPT
from fastp3o.evaluation.matched_kl import paired_difference

FEWEST = min(EQUAL_TOKENS)
COSTS = ("tokens", "seconds")
# What a cost buys: of the proxy less the KL times its coefficient, which is what training maximises, and the utility.
BOUGHT = {"objective": "reward − β KL", "gold_gain": "gold gain"}


def arm_of(algorithm: str, rate: float, responses: int) -> Arm:
    return Arm(algorithm, "none", rate, LONG_KL_COEF, responses)


def arms(study: Study) -> list[Arm]:
    """Those that have run."""
    planned = [
        arm_of(name, factor * chosen.learning_rate, responses)
        for name in MANY_RESPONSES
        if (chosen := question_arm(study, name))
        for factor in RATE_FACTORS
        for responses in EQUAL_TOKENS
    ]
    return [arm for arm in planned if len(study.runs_of(LONG_PROMPTS, arm))]


def evaluations(study: Study, runs: DataFrame) -> DataFrame:
    """Of these runs, by name and update: with what each had cost, and what training maximises."""
    found = study.evaluations_of(runs).reset_index("step")
    prompts = runs.set_index("name")["prompts_per_update"].reindex(found.index)
    return found.assign(
        tokens=found["response_tokens"] + found["step"] * prompts * LONG_PROMPT,
        objective=found["reward_gain"] - LONG_KL_COEF * found["kl"],
    )


def at_cost(study: Study, arm: Arm, cost: str, spent: float, bought: str) -> Series:
    """By task and seed: what a run had where it had cost so much; NaN where it never did."""
    runs = study.runs_of(LONG_PROMPTS, arm)
    by_run = dict(list(evaluations(study, runs).groupby(level="run")))
    found = [float(np.interp(spent, by_run[name][cost], by_run[name][bought], right=np.nan)) for name in runs["name"]]
    return Series(found, runs.index, dtype=float)


def budgets(study: Study, compared: Iterable[Arm]) -> dict[str, float]:
    """Of each cost what every run of these arms has spent at its end; nothing where none has run."""
    runs = [some for arm in compared if len(some := study.runs_of(LONG_PROMPTS, arm))]
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
    """Each K against 2 at the same rate."""
    return {
        f"{arm.algorithm} at {cells.rate(arm.learning_rate)}: K {arm.responses_per_prompt} − K {FEWEST}": (
            arm,
            arm._replace(responses_per_prompt=FEWEST),
        )
        for arm in arms(study)
        if arm.responses_per_prompt > FEWEST
    }


def rivals(study: Study) -> dict[str, tuple[Arm, Arm]]:
    """P3O against the others with as many responses, each at the rate that was chosen for it."""
    found = {}
    for name in MANY_RESPONSES[1:]:
        first, second = question_arm(study, MANY_RESPONSES[0]), question_arm(study, name)
        for responses in EQUAL_TOKENS if first and second else ():
            pair = [arm_of(arm.algorithm, arm.learning_rate, responses) for arm in (first, second)]
            found[f"{MANY_RESPONSES[0]} − {name}, K {responses}"] = tuple(pair)
    return found


def differences(study: Study, pairs: dict[str, tuple[Arm, Arm]]) -> tuple[list[list[str]], int]:
    """Of pairs that have both run, at equal KL and where both had cost what the cheaper one has at its end; and the
    number of intervals that hold together. Header first.
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

    both = [label for label, pair in pairs.items() if all(len(study.runs_of(LONG_PROMPTS, arm)) for arm in pair)]
    found = {label: values(pairs[label]) for label in both}

    def widened(count: int) -> together.Found:
        return {(label,): [paired_difference(*one, count) for one in of_pair] for label, of_pair in found.items()}

    names = OUTCOMES[LONG_PROMPTS] | BOUGHT
    titles = [f"{names[what]} at {'equal ' + at if isinstance(at, str) else f'KL {at:g}'}" for at, what in wanted]
    return together.table(["difference", *titles], widened)
