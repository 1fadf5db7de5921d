"""Runs the whole comparison; runs that are already in runs.jsonl are not run again.

python -m benchmarks.frontier                                        everything
python -m benchmarks.frontier --parts offsets --groups languages     some questions (runs/parts.py), on one group
python -m benchmarks.frontier --only language-0-ppo --results again  repeats runs whose names begin so
python -m benchmarks.frontier.report                                 tables and figures of recorded runs
"""

import argparse
import os
from pathlib import Path

from benchmarks.frontier.report.__main__ import write_report
from benchmarks.frontier.runs.execute import execute
from benchmarks.frontier.runs.parts import PARTS
from benchmarks.frontier.runs.records import RESULTS
from benchmarks.frontier.tasks.groups import GROUPS


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.frontier", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="Tasks.")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="Questions, see parts.py.")
    parser.add_argument("--only", default="", help="Only runs whose name begins so.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="Folder of runs.jsonl.")
    parser.add_argument("--runs", type=Path, default=Path("runs/frontier"), help="Folder of models and logs.")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="Runs at a time, one thread each.")
    arguments = parser.parse_args()
    execute(
        arguments.groups,
        arguments.parts,
        arguments.results,
        arguments.runs,
        only=arguments.only,
        workers=arguments.workers,
    )
    if arguments.results == RESULTS:
        write_report()


if __name__ == "__main__":
    main()
