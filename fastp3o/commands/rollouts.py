"""The best and the worst responses of an update.

fastp3o rollouts runs/p3o
fastp3o rollouts runs/p3o --update 10

Reads rollouts.jsonl of a run, also while it trains.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fastp3o.errors import visible
from fastp3o.run.log import LoggedGroup, prompt_end, read_updates
from fastp3o.run.names import ROLLOUTS

WIDTH = 110  # columns off a terminal


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="Output folder of an online run (--log_rollouts).")
    parser.add_argument(
        "--update", type=int, help="Update to show. Default: the last one that is logged."
    )
    parser.add_argument(
        "--count", type=int, default=3, help="Responses in each table (default: 3)."
    )
    arguments = parser.parse_args()
    if arguments.count < 1:
        parser.error(f"--count must be at least 1, got {arguments.count}")
    path = arguments.run / ROLLOUTS
    logged = find_update(path, arguments.update)
    if not logged.updates:
        parser.error(
            f"{path} does not exist, or has no whole update: online runs write it (--log_rollouts)"
        )
    update = logged.last if arguments.update is None else arguments.update
    if not logged.groups:
        parser.error(
            f"{path} has no update {update}; its {logged.updates} updates are from {logged.first} to {logged.last}"
        )
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    responses = [(group, response) for group in logged.groups for response in group.responses]
    responses.sort(key=lambda entry: entry[1].reward, reverse=True)
    for kind, chosen in (
        ("best", responses[: arguments.count]),
        ("worst", responses[::-1][: arguments.count]),
    ):
        columns = (Column("end of prompt", ratio=2), Column("response", ratio=3))
        numbers = (Column(name, justify="right") for name in ("reward", "log-ratio", "tokens"))
        title = f"update {update}: {kind} of {len(responses)} logged responses"
        table = Table(*columns, *numbers, title=title, show_lines=True)
        for group, response in chosen:
            ratio = "–" if response.log_ratio is None else f"{response.log_ratio:.3g}"
            tokens = f"{len(response.ids)}{'' if response.finished else ', cut'}"
            texts = shown(prompt_end(group.prompt)), shown(response.text)
            table.add_row(*texts, f"{response.reward:.4g}", ratio, tokens)
        console.print(table)


class Found(NamedTuple):
    """The groups of an update, empty if the log does not have it; the number of updates, the first
    and the last.
    """

    groups: list[LoggedGroup]
    updates: int
    first: int
    last: int


def find_update(path: Path, number: int | None) -> Found:
    """Finds an update by its number, or the last one, in a log that may be larger than memory."""
    logged = Found([], 0, 0, 0)
    for groups in read_updates(path):
        step = groups[0].step
        first, last = (
            (min(step, logged.first), max(step, logged.last)) if logged.updates else (step, step)
        )
        kept = groups if step == (last if number is None else number) else logged.groups
        logged = Found(kept, logged.updates + 1, first, last)
    return logged


def shown(text: str) -> Text:
    """Text as it is: a string in a table may hold rich's markup."""
    return Text(visible(text.strip()))
