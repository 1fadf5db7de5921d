"""The questions of each group of tasks, in the order in which they run."""

from collections.abc import Callable, Iterator

from benchmarks.frontier.runs import plan, questions, tuning
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES, LONG_PROMPTS, RETUNED, SIZES, WRONG_LABELS

Part = Callable[[str], Iterator[Run]]

# Each later part needs the rates that the first one chooses.
FIRST: tuple[Part, ...] = (
    *(plan.rates, plan.algorithms, plan.offsets, plan.clipping, plan.responses, plan.scaling, plan.kl_coefs),
    plan.other_rates,
)
# The first three choose the settings of the later ones.
TUNED: tuple[Part, ...] = (
    *(tuning.own_parameters, tuning.trial_rates, tuning.trial_kl_coefs),
    *(tuning.envelope, tuning.groups_of_four),
)
PLAN: dict[str, tuple[Part, ...]] = {
    LANGUAGES: FIRST,
    DOCSTRINGS: FIRST,
    RETUNED: (*TUNED, questions.reward_factor, questions.clip_range),
    LONG_PROMPTS: (questions.equal_cost,),
    **dict.fromkeys(WRONG_LABELS, (questions.wrong_labels,)),
    **dict.fromkeys(SIZES, (questions.sizes,)),
}
PARTS = tuple(dict.fromkeys(part.__name__ for parts in PLAN.values() for part in parts))


def parts_of(group: str) -> dict[str, Part]:
    """The parts of a group, by name."""
    return {part.__name__: part for part in PLAN[group]}
