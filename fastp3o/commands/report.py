"""One HTML file with curves, evaluations, options and responses of runs, to look at without a
server.

fastp3o report runs/p3o
fastp3o report runs/p3o runs/ppo --output both.html

Reads what the runs have logged, also while they train.
"""

import argparse
from pathlib import Path

from fastp3o.commands.win_rate import require_place
from fastp3o.run.names import REPORT


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="Output folders of runs.")
    parser.add_argument(
        "--output",
        type=Path,
        help="HTML file to write. Default: report.html in the run's folder, or here for several.",
    )
    parser.add_argument(
        "--most_responses",
        type=int,
        default=5000,
        help="Maximum number of logged responses of each run in the file; the latest are kept (default: 5000).",
    )
    arguments = parser.parse_args()
    if arguments.most_responses < 1:
        parser.error(f"--most_responses must be at least 1, got {arguments.most_responses}")
    # matplotlib takes half a second, which --help does without.
    from fastp3o.files import write_file
    from fastp3o.report.page import page
    from fastp3o.report.read import read_runs

    runs = read_runs(arguments.runs)
    output = arguments.output or (runs[0].folder if len(runs) == 1 else Path()) / REPORT
    require_place(output)
    write_file(output, page(runs, arguments.most_responses))
    print(f"report: {output}")
