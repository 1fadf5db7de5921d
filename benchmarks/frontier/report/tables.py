"""Recorded runs -> the tables of README.md and the list of all runs.

    python benchmarks/frontier/tables.py

What has no runs is written "not measured".
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.frontier import cells, comparisons, endpoints, every_run, learning_rates
from benchmarks.frontier.acceptance import verdicts
from benchmarks.frontier.plan import GROUPS, HIGH_LEARNING_RATE
from benchmarks.frontier.records import FOLDER, RESULTS, Study, load, read
from benchmarks.frontier.sanity import Optimum
from benchmarks.goals import NOT_MEASURED
from benchmarks.report import between_markers, markdown

README = FOLDER / "README.md"
ALL_RUNS = FOLDER / "all_runs.md"
NAMES = (
    "Names: task, algorithm, learning rate, KL coefficient, seed, offset, its standard deviation, responses per "
    "prompt, prompts per update. `python benchmarks/frontier/run.py --only NAME --results FOLDER` does a run again."
)


def sections(study: Study, optimum: Optimum) -> str:
    parts = ["## Acceptance", markdown([["rule", "measured", ""], *map(list, verdicts(study, optimum))])]
    for group in GROUPS:
        parts += of_group(study, group)
    return "\n\n".join(parts)


def of_group(study: Study, group: str) -> list[str]:
    title = group.capitalize()
    compared, count = comparisons.differences(study, group)
    rate = cells.rate(HIGH_LEARNING_RATE)
    return [
        f"## {title}: gain at matched KL",
        "Mean over seeds [95% interval] (seeds that reach the KL after their first evaluation). First KL: the smallest "
        "and largest of the first evaluation.",
        shown(comparisons.levels(study, group)),
        f"## {title}: paired differences",
        f"Over seeds that both arms share [95% intervals that hold together for all {count} in the table] (seeds):",
        shown(compared),
        f"## {title}: learning rates",
        "Proxy; chosen rates in bold. Mean [95% interval] (seeds that reach the KL):",
        shown(learning_rates.table(study, group)),
        "How far apart these means lie at most, over the learning rates of each algorithm and over algorithms at their "
        "chosen rates (seeds of the results; arms of which most seeds reach the KL):",
        shown(learning_rates.spreads(study, group)),
        f"## {title}: clipping at learning rate {rate}",
        shown(endpoints.clipping(study, group)),
        f"## {title}: scaling by the deviation of absolute scores",
        shown(endpoints.scaling(study, group)),
        f"## {title}: KL coefficients",
        shown(endpoints.sweep(study, group)),
        "Straight lines through the ends of these runs, proxy:",
        shown(endpoints.lines(study, group)),
    ]


def shown(rows: list[list[str]]) -> str:
    """A table, unless nothing in it was measured."""
    return markdown(rows) if any(row[-1] != NOT_MEASURED for row in rows[1:]) else f"{NOT_MEASURED.capitalize()}."


def write() -> None:
    study = load()
    optimum = json.loads(read(RESULTS / "optimum.json") or "{}")
    README.write_text(between_markers(README.read_text(), "tables", sections(study, optimum)))
    ALL_RUNS.write_text(f"# All {len(study.runs)} runs\n\n{NAMES}\n\n{markdown(every_run.table(study.runs))}\n")


if __name__ == "__main__":
    write()
