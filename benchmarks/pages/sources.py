"""What the sections of pages are made of: all records, and what several sections read from them."""

import json
import re
from collections.abc import Callable
from typing import Any

from benchmarks.goals import BOTH, GPU
from benchmarks.records import CPU_RECORDS, GPU_RECORD, RESULTS, Results, load, results_of, select

Records = dict[str, Any]  # by the names of their files; the quickstart's seeds together
Section = Callable[[Records], str]
SEEDS, EXPLOITED = "quickstart/seed_*.txt", "quickstart/exploited.eval.jsonl"
# The number of tokens at which every implementation is measured on a GPU.
N = 8192
HIDDEN = {"level": "hidden", "passes": BOTH}
LOGITS = {"level": "logits", "passes": BOTH}
FROZEN = {"level": "hidden", "passes": f"frozen head, {BOTH}"}


def records() -> Records:
    found: Records = {path.name: load(path) for path in sorted(RESULTS.glob("*.json"))}
    printed = sorted((RESULTS / "quickstart").glob("seed_*.txt"))
    found[SEEDS] = [quickstart_figures(path.read_text()) for path in printed]
    lines = (RESULTS / EXPLOITED).read_text().splitlines()
    return found | {EXPLOITED: [json.loads(line) for line in lines]}


def quickstart_figures(printed: str) -> dict[str, float]:
    """What a run of scripts/quickstart.sh printed of its reward model and of the taste before and
    after.
    """
    number = r"(-?\d+\.?\d*)"
    (accuracy,) = re.findall(rf"accuracy {number},", printed)
    figures = {"accuracy": float(accuracy)}
    for when in ("before", "after"):
        (found,) = re.findall(
            rf"^  {when} +sampled +{number} ± {number} +greedy +{number}$", printed, re.MULTILINE
        )
        names = (f"sampled {when}", f"deviation {when}", f"greedy {when}")
        figures |= dict(zip(names, map(float, found), strict=True))
    return figures


def results(records: Records, device: str) -> Results:
    return results_of(records[name] for name in ((GPU_RECORD,) if device == GPU else CPU_RECORDS))


def ways(measured: Results, name: str, **wanted: object) -> list[dict]:
    """What a way of sampling took in each rollout."""
    rollouts = select(measured, level="rollouts", **wanted)
    return [result["ways"][name] for result in rollouts if "ratio" in result["ways"].get(name, {})]


def rates(results: Results) -> list[float]:
    return [1 / result["ratio_to_bare"] for result in results]
