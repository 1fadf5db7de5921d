"""The committed records -> the verdicts of README.md, tables.md, all_runs.md, the figures, and the plot of the
repository's README.

python -m benchmarks.frontier.report
"""

import json
from pathlib import Path

from benchmarks.frontier.gradients import figure as gradients
from benchmarks.frontier.report import (
    equal_kl,
    figures,
    passes,
    readme_plot,
    rewards,
    stale,
    tables,
    tuned_figures,
    verdicts,
)
from benchmarks.frontier.report.study import load_study
from benchmarks.frontier.runs.records import RESULTS, read

README_PLOT = Path(__file__).parents[3] / ".github" / "offset.svg"


def write_report() -> None:
    study = load_study()
    optimum = json.loads(read(RESULTS / "optimum.json") or "{}")
    win_rates = json.loads(read(RESULTS / "win_rates.json") or "[]")
    tables.TABLES.write_text(tables.tables_page(study, optimum))
    verdicts.write(study)
    tables.ALL_RUNS.write_text(tables.all_runs_page(study))
    drawn = {
        README_PLOT: lambda path: readme_plot.draw(study, path),
        RESULTS / "frontier.png": lambda path: figures.frontier(study, optimum, path),
        RESULTS / "offset.png": lambda path: figures.offset(study, path),
        RESULTS / "sweep.png": lambda path: figures.kl_coefs(study, path),
        RESULTS / "clipping.png": lambda path: figures.clipping(study, path),
        RESULTS / "learning_rates.png": lambda path: figures.learning_rates(study, path),
        RESULTS / "win_rates.png": lambda path: figures.win_rates(win_rates, path),
        RESULTS / "envelope.png": lambda path: tuned_figures.envelope(study, optimum, path),
        RESULTS / "questions.png": lambda path: tuned_figures.one_setting_at_a_time(study, path),
        RESULTS / "stale.png": lambda path: stale.figure(study, path),
        RESULTS / "equal_kl.png": lambda path: equal_kl.figure(study, path),
        RESULTS / "passes.png": lambda path: passes.figure(study, path),
        RESULTS / "scales.png": lambda path: rewards.scales_figure(study, path),
        RESULTS / "offset_doses.png": lambda path: rewards.figure(study, path),
        RESULTS / "equal_cost.png": lambda path: tuned_figures.by_responses(study, path),
    }
    for path, draw in drawn.items():
        print(f"{path.name}: {'written' if draw(path) else 'skipped, its runs have not been made'}")
    gradients.write_figure_and_table()


if __name__ == "__main__":
    write_report()
