"""Reward at matched KL of two sets of runs that differ in one setting, paired by seed, with 95% Student intervals.

fastp3o compare --first runs/joint-seed* --second runs/ppo-seed* --kl 1 2 4
"""

import argparse
import math
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Column, Table

from fastp3o.errors import UserError
from fastp3o.evaluation import matched_kl
from fastp3o.evaluation.matched_kl import Estimate, Evaluations, Seed, gain_at_kl, paired_difference
from fastp3o.run.names import CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--first", nargs="+", type=Path, required=True, help="Output folders of the first arm, one run per seed."
    )
    parser.add_argument(
        "--second",
        nargs="+",
        type=Path,
        required=True,
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
    sides = [read_seeds(folders, arguments.metric) for folders in (arguments.first, arguments.second)]
    print_table(sides, arguments.kl, arguments.metric)


def read_seeds(folders: list[Path], metric: str) -> dict[Seed, Evaluations]:
    """The evaluations of each run, by the prompts it was evaluated on and its seed.

    Raises ValueError for a folder without a run, a run without `metric` in its evaluations, and two runs of one seed.
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
    columns = (Column(name, justify="right") for name in ("KL, nats", "first", "second", "first − second, paired"))
    title = f"{metric}: gain over update 0, mean [95% interval over seeds] (seeds that reach the KL)"
    caption = "KL exceeded: already at the first evaluation after update 0, so no gain was measured (--eval_at 1,2,5)"
    table = Table(*columns, title=title, caption=caption)
    for kl in kls:
        gains = [{seed: gain_at_kl(run, kl, metric) for seed, run in side.items()} for side in sides]
        early = [sum(any(evaluation["kl"] >= kl for evaluation in run[:2]) for run in side.values()) for side in sides]
        none = [f"KL exceeded ({count})" if count else "not reached" for count in early]
        means = map(matched_kl.interval, gains)
        cells = [format_estimate(mean, absent) for mean, absent in zip(means, none, strict=True)]
        table.add_row(f"{kl:g}", *cells, format_estimate(paired_difference(*gains), "–"))
    Console(width=110).print(table)
    print(f"{len(sides[0].keys() & sides[1].keys())} seeds in both; each interval is single")


def format_estimate(estimate: Estimate | None, absent: str) -> str:
    """absent: stands for no estimate."""
    if estimate is None:
        return absent
    limits = f" [{estimate.low:.3f}, {estimate.high:.3f}]" if math.isfinite(estimate.low) else ""
    return f"{estimate.mean:.3f}{limits} ({estimate.count})"
