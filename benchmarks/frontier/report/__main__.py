"""The committed results -> tables.md, all_runs.md and the figures: python -m benchmarks.frontier.report"""

from benchmarks.frontier.report.write import write_report

if __name__ == "__main__":
    write_report()
