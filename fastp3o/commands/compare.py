"""Runs side by side: the options that differ, last evaluations, curves in one picture, answers to
the same prompts.

fastp3o compare runs/a runs/b

With --first and --second: the reward at matched KL of two sets of runs that differ in one setting,
paired by seed, with 95% Student intervals.

fastp3o compare --first runs/joint-seed* --second runs/ppo-seed* --kl 1 2 4
"""

import argparse
import math
from itertools import islice
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fastp3o.commands.rollouts import WIDTH
from fastp3o.commands.win_rate import require_place
from fastp3o.errors import UserError, visible
from fastp3o.evaluation import matched_kl
from fastp3o.evaluation.matched_kl import Estimate, Evaluations, Seed, gain_at_kl, paired_difference
from fastp3o.files import whole_file
from fastp3o.report.curves import draw_curves
from fastp3o.report.page import shown
from fastp3o.report.read import LoggedRun, answers, differing_options, last_evaluations, read_runs
from fastp3o.run.log import prompt_end
from fastp3o.run.names import CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="Output folders of two or more runs.")
    parser.add_argument(
        "--output", type=Path, default=Path("compare.png"), help="Picture of the runs' curves."
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=5,
        help="Number of prompts to show with the runs' answers (default: 5).",
    )
    parser.add_argument(
        "--first", nargs="+", type=Path, help="Output folders of the first arm, one run per seed."
    )
    parser.add_argument(
        "--second",
        nargs="+",
        type=Path,
        help="Output folders of the runs to compare with, one per seed.",
    )
    parser.add_argument(
        "--kl",
        nargs="+",
        type=float,
        default=[1.0, 2.0, 4.0],
        help="KLs to the reference at which rewards are compared, in nats per response.",
    )
    parser.add_argument(
        "--metric",
        choices=["reward", "gold"],
        default="reward",
        help="Reward of the evaluations to compare: reward, or gold (--gold_reward).",
    )
    arguments = parser.parse_args()
    if bool(arguments.first) != bool(arguments.second) or bool(arguments.first) == (
        len(arguments.runs) > 0
    ):
        parser.error("expected the folders of two or more runs, or else --first and --second")
    if arguments.runs:
        if len(arguments.runs) < 2:
            parser.error(f"one run, {arguments.runs[0]}: fastp3o report shows a single one")
        print_runs(read_runs(arguments.runs), arguments.output, arguments.prompts)
        return
    sides = [
        read_seeds(folders, arguments.metric) for folders in (arguments.first, arguments.second)
    ]
    print_table(sides, arguments.kl, arguments.metric)


def print_runs(runs: list[LoggedRun], picture: Path, prompts: int) -> None:
    """Prints what differs between runs and what they answer, and draws their curves."""
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    differing, evaluated = differing_options(runs), last_evaluations(runs)
    for title, rows in (("options that differ", differing), ("last evaluation", evaluated)):
        table = Table("", *(Column(Text(run.name)) for run in runs), title=title)
        for name, values in rows.items():
            table.add_row(name, *(Text(shown(value)) for value in values))
        console.print(table if rows else f"{title}: none")
    answered = dict(islice(answers(runs).items(), prompts))
    columns = [Column(Text(name)) for name in ("end of prompt", *(run.name for run in runs))]
    table = Table(*columns, title="first answers of the last updates", show_lines=True)
    for prompt, responses in answered.items():
        cells = [
            "–"
            if response is None
            else f"{visible(response.text.strip())}\n[{response.reward:.4g}]"
            for response in responses
        ]
        table.add_row(Text(visible(prompt_end(prompt))), *map(Text, cells))
    console.print(
        table
        if answered
        else "answers: the runs have logged no prompt in common (--log_rollouts_prompts)"
    )
    if figure := draw_curves(runs):
        require_place(picture)
        with whole_file(picture) as file:
            figure.savefig(file, dpi=120, format="png")
        print(f"curves: {picture}")


def read_seeds(folders: list[Path], metric: str) -> dict[Seed, Evaluations]:
    """The evaluations of each run, by the prompts it was evaluated on and its seed.

    Raises ValueError for a folder without a run, a run without `metric` in its evaluations, and two
    runs of one seed.
    """
    runs: dict[Seed, Evaluations] = {}
    for folder in folders:
        evaluations = matched_kl.read_run(folder)
        if any(metric not in evaluation for evaluation in evaluations):
            raise UserError(f"{folder} was evaluated without a {metric} reward (--gold_reward)")
        config = yaml.safe_load((folder / CONFIG).read_text())
        seed = (str(config["eval_prompts"]), config["seed"])
        if seed in runs:
            raise UserError(f"{folder} is a second run with seed {seed[1]} on {seed[0]}")
        runs[seed] = evaluations
    return runs


def print_table(sides: list[dict[Seed, Evaluations]], kls: list[float], metric: str) -> None:
    """Prints the gains of both sides over update 0 at each KL, and their paired difference."""
    table = Table(
        title=f"{metric}: gain over update 0, mean [95% interval over seeds] (seeds that reach the KL)",
        caption="KL exceeded: already at the first evaluation after update 0, so no gain was "
        "measured (--eval_at 1,2,5)",
    )
    for name in ("KL, nats", "first", "second", "first − second, paired"):
        table.add_column(name, justify="right")
    for kl in kls:
        cells, gains = [], []
        for side in sides:
            gains.append({seed: gain_at_kl(run, kl, metric) for seed, run in side.items()})
            # Update 0 and the first evaluation after it.
            begins = [run[:2] for run in side.values()]
            early = sum(any(one["kl"] >= kl for one in begin) for begin in begins)
            absent = f"KL exceeded ({early})" if early else "not reached"
            cells.append(format_estimate(matched_kl.interval(gains[-1]), absent))
        first, second = gains
        paired = format_estimate(paired_difference(first, second), "–")
        table.add_row(f"{kl:g}", *cells, paired)
    Console(width=110).print(table)
    print(f"{len(sides[0].keys() & sides[1].keys())} seeds in both; each interval is single")


def format_estimate(estimate: Estimate | None, absent: str) -> str:
    """absent: stands for no estimate."""
    if estimate is None:
        return absent
    limits = f" [{estimate.low:.3f}, {estimate.high:.3f}]" if math.isfinite(estimate.low) else ""
    return f"{estimate.mean:.3f}{limits} ({estimate.count})"
