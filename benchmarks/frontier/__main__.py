"""Runs the study; runs that are already in runs.jsonl are not run again.

python -m benchmarks.frontier                                              everything
python -m benchmarks.frontier --parts scales_rates scales                  some questions
python -m benchmarks.frontier --only many_languages-0-ppo --results again  repeats runs whose names begin so
python -m benchmarks.frontier.report                                       table and figures of recorded runs
"""

import argparse
import os
from pathlib import Path

from benchmarks.frontier.runs.execute import PARTS, execute
from benchmarks.frontier.tasks.task import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="Questions.")
    parser.add_argument("--only", default="", help="Only runs whose name begins so.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of runs.jsonl.")
    parser.add_argument(
        "--runs",
        type=Path,
        default=Path("runs/frontier"),
        help="Folder of starts, models and logs.",
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="Runs at a time, one thread each."
    )
    asked = parser.parse_args()
    execute(
        asked.parts,
        asked.results / "runs.jsonl",
        asked.runs,
        only=asked.only,
        workers=asked.workers,
    )


if __name__ == "__main__":
    main()
