"""The committed results -> tables.md, all_runs.md and the figures."""

import json

from benchmarks.frontier.report import figures, further_figures, tables
from benchmarks.frontier.report.study import load_study
from benchmarks.frontier.runs.records import RESULTS, read
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES


def write_report() -> None:
    study = load_study()
    optimum = json.loads(read(RESULTS / "optimum.json") or "{}")
    win_rates = json.loads(read(RESULTS / "win_rates.json") or "[]")
    tables.TABLES.write_text(tables.tables_page(study, optimum))
    tables.ALL_RUNS.write_text(tables.all_runs_page(study))
    drawn = {
        "envelope.png": lambda path: further_figures.envelope(study, optimum, path),
        "questions.png": lambda path: further_figures.of_questions(study, path),
        "equal_cost.png": lambda path: further_figures.of_equal_cost(study, path),
        "frontier.png": lambda path: figures.frontier(study, optimum, LANGUAGES, path),
        "docstrings.png": lambda path: figures.frontier(study, optimum, DOCSTRINGS, path),
        "sweep.png": lambda path: figures.kl_coefs(study, path),
        "clipping.png": lambda path: figures.clipping(study, path),
        "learning_rates.png": lambda path: figures.learning_rates(study, path),
        "win_rates.png": lambda path: figures.win_rates(win_rates, path),
    }
    for name, draw in drawn.items():
        print(f"{name}: {'written' if draw(RESULTS / name) else 'skipped, its runs have not been made'}")
