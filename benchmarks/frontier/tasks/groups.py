"""The tasks by name, and the groups whose results are reported together."""

LANGUAGES, DOCSTRINGS = "languages", "docstrings"
# The languages again, for the comparison of all algorithms. Made on another machine, their reward models differ from
# those of LANGUAGES by rounding, so they are groups of their own and their runs are paired with no others.
RETUNED, LONG_PROMPTS = "retuned", "long_prompts"
# Ten languages, whose models are committed, so that runs on any machine start from the same weights. Eight of them have
# one seed each, and their runs are independent; on the other two settings are chosen.
MANY_LANGUAGES = "many_languages"

# Groups that differ from RETUNED in one thing: the share of wrong labels that the reward model learned from, or the
# policy's number of parameters.
WRONG_LABELS = {"wrong_labels_20": 0.2, "wrong_labels_35": 0.35}
SIZES = {"size_1m": 1_000_000, "size_6m": 6_000_000}

# Group -> its tasks. Two languages of the same kind stand for the synthetic task, so that seeds do not share one
# accident of its tables.
TASKS = {
    LANGUAGES: ("language-0", "language-1"),
    DOCSTRINGS: ("docstrings",),
    MANY_LANGUAGES: tuple(f"{MANY_LANGUAGES}-{number}" for number in range(10)),
    **{group: (f"{group}-0", f"{group}-1") for group in (RETUNED, LONG_PROMPTS, *WRONG_LABELS, *SIZES)},
}
GROUPS = tuple(TASKS)
# The groups of the first comparison.
STUDIED = (LANGUAGES, DOCSTRINGS)


def group_of(task: str) -> str:
    return next(group for group, tasks in TASKS.items() if task in tasks)


def base_of(task: str) -> str:
    """The RETUNED task with the same language; tasks of WRONG_LABELS and SIZES reuse its parts."""
    return TASKS[RETUNED][TASKS[group_of(task)].index(task)]
