"""The tasks by name, and the groups whose results are reported together."""

LANGUAGES, DOCSTRINGS = "languages", "docstrings"

# Group -> its tasks. Two languages of the same kind stand for the synthetic task, so that seeds do not share one
# accident of its tables.
TASKS = {LANGUAGES: ("language-0", "language-1"), DOCSTRINGS: ("docstrings",)}
GROUPS = tuple(TASKS)


def group_of(task: str) -> str:
    return next(group for group, tasks in TASKS.items() if task in tasks)
