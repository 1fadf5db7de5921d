"""Reward against sequence KL of one or several runs, as in figure 3 of arXiv 2310.00212, with a line fitted to each.

fastp3o frontier runs/joint runs/separate --output frontier.png
"""

import argparse
from pathlib import Path

from fastp3o.evaluation.frontier import plot, print_table, read_run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="Output folders of P3O runs, with evaluations.")
    parser.add_argument("--output", type=Path, default=Path("frontier.png"), help="PNG to write.")
    arguments = parser.parse_args()
    names = [run.name for run in arguments.runs]
    runs = {run.name if names.count(run.name) == 1 else str(run): read_run(run) for run in arguments.runs}
    print_table(runs)
    plot(runs, arguments.output)
    print(f"plot: {arguments.output}")
