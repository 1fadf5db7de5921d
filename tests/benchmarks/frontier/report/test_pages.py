"""The study's page and the front page state what the recorded runs give."""

import re
from pathlib import Path

import pytest

from benchmarks.frontier.report import arithmetic, bands, circles, kl_coefs, readme_plot, verdicts
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import tuned_arms
from benchmarks.frontier.runs.records import load
from benchmarks.frontier.tasks.task import RESULTS
from benchmarks.markdown import between_markers, markdown

FRONT_PAGE = (Path(__file__).parents[4] / "README.md").read_text()


@pytest.fixture(scope="module")
def study() -> Study:
    return Study(load(RESULTS / "runs.jsonl"), tuned_arms.chosen())


def test_the_studys_tables_are_what_the_runs_give(study):
    page = verdicts.README.read_text()
    tables = {
        "verdicts": verdicts.table(study),
        "beta": kl_coefs.table(study),
        "sums": arithmetic.table(),
    }
    tables |= {
        "circles": circles.table(),
        "reward models of circles": circles.reward_models(),
        "differences of circles": circles.differences(),
    }
    tables |= {"bands": bands.table(), "bands of a real model": bands.real_table()}
    for name, table in tables.items():
        assert between_markers(page, name, markdown(table)) == page, (
            "run: python -m benchmarks.frontier.report"
        )


def test_the_front_pages_results_are_the_studys(study):
    results = FRONT_PAGE.partition("## Results")[2].partition("\n## ")[0]
    number = r"−?\d\.\d\d"
    stated = {tuple(one) for one in re.findall(rf"({number}) \[({number}), ({number})\]", results)}
    known = {found.estimate[:3] for found in verdicts.verdicts(study)}
    sums = re.findall(
        rf"({number}) \[({number}), ({number})\]", markdown(arithmetic.table()).replace("+", "")
    )
    written = {
        tuple(f"{value:.2f}".replace("-", "−").replace("−0.00", "0.00") for value in one)
        for one in known
    }
    assert written <= stated
    assert stated <= written | set(sums)
    runs = (RESULTS / "runs.jsonl").read_text().count("\n")
    assert f"[{runs:,} runs]" in results


def test_the_front_pages_range_of_what_offsets_cost_is_the_plots(study):
    ends = readme_plot.ends(study)
    without = ends["0"].mean
    costs = [
        1 - ends[f"{deviation:g}"].mean / without
        for deviation in readme_plot.DEVIATIONS
        if deviation
    ]
    said = f"it costs PPO {100 * min(costs):.0f} to {100 * max(costs):.0f}% of its result"
    assert said in " ".join(FRONT_PAGE.split())
