"""Recorded runs -> tables.md and all_runs.md. What has no runs is written "not measured"."""

from pathlib import Path

from benchmarks.frontier.report import (
    answers,
    cells,
    comparisons,
    endpoints,
    envelope,
    equal_cost,
    every_run,
    learning_rates,
    questions,
)
from benchmarks.frontier.report.acceptance import checked_rules
from benchmarks.frontier.report.sanity import Optimum
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs.plan import HIGH_LEARNING_RATE
from benchmarks.frontier.tasks.groups import STUDIED
from benchmarks.goals import NOT_MEASURED
from benchmarks.report import markdown

FOLDER = Path(__file__).parents[1]
TABLES, ALL_RUNS = FOLDER / "tables.md", FOLDER / "all_runs.md"
NAMES = (
    "Names: task, algorithm, learning rate, KL coefficient, seed, offset, its standard deviation, responses per "
    "prompt, prompts per update, and what is not as by default. `python -m benchmarks.frontier --only NAME --results "
    "FOLDER` does a run again."
)


def tables_page(study: Study, optimum: Optimum) -> str:
    made = "Made of the recorded runs by `python -m benchmarks.frontier.report`; README.md says what they mean."
    parts = ["# Tables", made]
    parts += ["## Acceptance", markdown([["rule", "measured", ""], *map(list, checked_rules(study, optimum))])]
    for group in STUDIED:
        parts += group_sections(study, group)
    parts += envelope_sections(study, optimum)
    for question in questions.questions(study):
        parts += question_sections(study, question)
    parts += equal_cost_sections(study)
    return "\n\n".join(parts) + "\n"


def group_sections(study: Study, group: str) -> list[str]:
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
        shown(endpoints.kl_coefs(study, group)),
        "Straight lines through the ends of these runs, proxy:",
        shown(endpoints.fitted_lines(study, group)),
    ]


def envelope_sections(study: Study, optimum: Optimum) -> list[str]:
    compared, count = envelope.differences(study)
    return [
        "## Retuned: every algorithm tuned over learning rate and KL coefficient",
        "At each KL with the setting that the selection seeds chose for it. Algorithms that a group's mean and "
        "deviation define take K 4 of 32 prompts, the others K 2 of 64. Mean over seeds [95% interval] (seeds that "
        "reach the KL):",
        shown(envelope.table(study, optimum)),
        "Paired differences over seeds that both share [95% intervals that hold together for all "
        f"{count} in the table] (seeds):",
        shown(compared),
        "The trials on the selection seeds:",
        shown(envelope.trials(study)),
        "Published algorithms, all with K 4 of 32 prompts, at their setting for the highest KL:",
        shown(envelope.in_fours(study)),
    ]


def question_sections(study: Study, question: questions.Question) -> list[str]:
    compared, count = answers.differences(study, question)
    return [
        f"## Retuned: {question.title}",
        "Mean over seeds [95% interval] (seeds that reach the KL):",
        shown(answers.table(study, question)),
        f"Paired differences [95% intervals that hold together for all {count} in the table] (seeds):",
        shown(compared),
    ]


def equal_cost_sections(study: Study) -> list[str]:
    of_responses, many = equal_cost.differences(study, equal_cost.more_responses(study))
    of_rivals, fewer = equal_cost.differences(study, equal_cost.rivals(study))
    return [
        "## Long prompts: K at equal cost",
        "Prompts of 122 tokens, and the rate that was chosen for each algorithm on short ones. Tokens are those of "
        "prompts, each once, and of responses; seconds are of one core, without evaluations. β is the KL coefficient. "
        "Equal costs are those of the cheapest run of all, and of a pair below those of the cheaper one. Mean over "
        "seeds [95% interval] (seeds):",
        shown(equal_cost.table(study)),
        f"More responses, paired differences [95% intervals that hold together for all {many} in the table] (seeds):",
        shown(of_responses),
        f"Algorithms with as many responses, paired differences [95% intervals that hold together for all {fewer} in "
        "the table] (seeds):",
        shown(of_rivals),
    ]


def shown(lines: list[list[str]]) -> str:
    """A table, unless nothing in it was measured."""
    return markdown(lines) if any(line[-1] != NOT_MEASURED for line in lines[1:]) else f"{NOT_MEASURED.capitalize()}."


def all_runs_page(study: Study) -> str:
    return f"# All {len(study.records.runs)} runs\n\n{NAMES}\n\n{markdown(every_run.table(study.records))}\n"
