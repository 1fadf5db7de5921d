"""The committed records -> the verdicts of README.md, the figures, and the plot of the repository's
README.

python -m benchmarks.frontier.report            writes them
python -m benchmarks.frontier.report --table    prints every arm and every paired difference
"""

import argparse
from itertools import chain
from pathlib import Path

from benchmarks.frontier.report import (
    kl_coefs,
    measures,
    readme_plot,
    real_model,
    rewards,
    settings,
    stale,
    verdicts,
)
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import tuned_arms
from benchmarks.frontier.runs.execute import ARMS
from benchmarks.frontier.runs.records import load
from benchmarks.frontier.runs.stale import LAGS
from benchmarks.frontier.tasks.task import RESULTS
from benchmarks.markdown import markdown

README_PLOT = Path(__file__).parents[3] / ".github" / "offset.svg"
FIGURES = {
    README_PLOT: readme_plot.draw,
    RESULTS / "stale.svg": stale.figure,
    RESULTS / "real_model.svg": real_model.figure,
}


def tables(study: Study) -> list[list[list[str]]]:
    """Verdicts, arms at their levels, paired differences, gains against β, weights under offsets."""
    arms = chain.from_iterable(arms() for arms in ARMS.values())
    rivals = [pair for lag in LAGS for K in (4, 16) for pair in stale.rivals(study, lag, K)]
    return [
        verdicts.table(study),
        measures.levels(study, arms),
        measures.differences(study, [*rivals, *rewards.pairs(), *settings.pairs()]),
        kl_coefs.table(study),
        rewards.different_weights(study),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="Print tables, and write nothing.")
    study = Study(load(RESULTS / "runs.jsonl"), tuned_arms.chosen())
    if parser.parse_args().table:
        print("\n\n".join(map(markdown, tables(study))))
        return
    verdicts.write(study)
    for path, draw in FIGURES.items():
        print(
            f"{path.name}: {'written' if draw(study, path) else 'skipped, its runs have not been made'}"
        )


if __name__ == "__main__":
    main()
