"""The questions of each group of tasks, in the order in which they run."""

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.frontier.runs import equal_kl, plan, questions, rewards, sixteen, stale, tuning
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import results, trials
from benchmarks.frontier.tasks.groups import (
    DOCSTRINGS,
    LANGUAGES,
    LONG_PROMPTS,
    MANY_LANGUAGES,
    RETUNED,
    SIZES,
    WRONG_LABELS,
)

Part = Callable[[str], Iterator[Run]]


def named(*parts: Part) -> dict[str, Part]:
    return {part.__name__: part for part in parts}


def tuned(runs: Callable[[Iterator[Run]], Iterator[Run]], arms: Callable[[], Iterator[Run]]) -> Part:
    return lambda group: runs(arms())


# Each later part needs the rates that the first one chooses.
FIRST = named(
    *(plan.rates, plan.algorithms, plan.offsets, plan.clipping, plan.responses, plan.scaling, plan.kl_coefs),
    plan.other_rates,
)
# The first three choose the settings of the later ones.
TUNED = named(
    *(tuning.own_parameters, tuning.trial_rates, tuning.trial_kl_coefs),
    *(tuning.envelope, tuning.groups_of_four),
    *(questions.reward_factor, questions.clip_range),
)
# Question -> its arms, each of which is tuned by the first of two parts and run by the second.
ARMS: dict[str, Callable[[], Iterator[Run]]] = {
    **{f"lag_{lag}": partial(stale.at_lag, lag) for lag in stale.LAGS},
    "offset_doses": rewards.without_offset,
    "scales": rewards.scales,
    "groups_of_sixteen": sixteen.groups_of_sixteen,
    **{f"passes_{passes}": partial(stale.with_passes, passes) for passes in stale.PASSES},
}
MANY = named(stale.corrections)
for question, arms in ARMS.items():
    MANY |= {f"{question}_rates": tuned(trials, arms), question: tuned(results, arms)}
MANY |= named(rewards.offset_doses, equal_kl.equal_kl_trials, equal_kl.equal_kl_longer, equal_kl.equal_kl)

PLAN: dict[str, dict[str, Part]] = {
    LANGUAGES: FIRST,
    DOCSTRINGS: FIRST,
    RETUNED: TUNED,
    LONG_PROMPTS: named(questions.equal_cost),
    **dict.fromkeys(WRONG_LABELS, named(questions.wrong_labels)),
    **dict.fromkeys(SIZES, named(questions.sizes)),
    MANY_LANGUAGES: MANY,
}
PARTS = tuple(dict.fromkeys(name for parts in PLAN.values() for name in parts))


def parts_of(group: str) -> dict[str, Part]:
    """The parts of a group, by name."""
    return PLAN[group]
