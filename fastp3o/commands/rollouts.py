"""The best and the worst responses of an update, and the prompts that changed most between two updates.

fastp3o rollouts runs/p3o
fastp3o rollouts runs/p3o --update 10 --compare 40

Reads rollouts.jsonl of a run, also while it trains.
"""

import argparse
from itertools import zip_longest
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from fastp3o.errors import visible
from fastp3o.run.log import LoggedGroup, prompt_end, read_updates
from fastp3o.run.names import ROLLOUTS

WIDTH = 110  # columns off a terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="Output folder of an online run (--log_rollouts).")
    parser.add_argument("--update", type=int, help="Update to show; by default the last one that is logged.")
    parser.add_argument("--compare", type=int, help="Another update: show the prompts in both that changed most.")
    parser.add_argument("--count", type=int, default=3, help="Responses, or prompts, of each table (default: 3).")
    arguments = parser.parse_args()
    if arguments.count < 1:
        parser.error(f"--count must be at least 1, got {arguments.count}")
    path = arguments.run / ROLLOUTS
    updates = {groups[0].step: groups for groups in read_updates(path)}
    if not updates:
        parser.error(f"{path} does not exist, or has no whole update: online runs write it (--log_rollouts)")
    update = max(updates) if arguments.update is None else arguments.update
    for wanted in (update, arguments.compare):
        if wanted is not None and wanted not in updates:
            parser.error(f"{path} has no update {wanted}; it has {', '.join(map(str, updates))}")
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    if arguments.compare is None:
        print_extremes(console, updates[update], arguments.count)
    else:
        print_changes(console, updates[update], updates[arguments.compare], arguments.count)


def print_extremes(console: Console, groups: list[LoggedGroup], count: int) -> None:
    """Prints the responses of an update with the highest and with the lowest rewards."""
    responses = [(group, response) for group in groups for response in group.responses]
    responses.sort(key=lambda one: one[1].reward, reverse=True)
    for kind, chosen in (("best", responses[:count]), ("worst", responses[::-1][:count])):
        columns = (Column("end of prompt", ratio=2), Column("response", ratio=3))
        numbers = (Column(name, justify="right") for name in ("reward", "log-ratio", "tokens"))
        title = f"update {groups[0].step}: {kind} of {len(responses)} logged responses"
        table = Table(*columns, *numbers, title=title, show_lines=True)
        for group, response in chosen:
            ratio = "–" if response.log_ratio is None else f"{response.log_ratio:.3g}"
            tokens = f"{len(response.ids)}{'' if response.finished else ', cut'}"
            texts = shown(prompt_end(group.prompt)), shown(response.text)
            table.add_row(*texts, f"{response.reward:.4g}", ratio, tokens)
        console.print(table)


def print_changes(console: Console, before: list[LoggedGroup], after: list[LoggedGroup], count: int) -> None:
    """Prints the prompts of two updates whose mean rewards changed most, with their responses in both."""
    first, second = ({group.prompt: group.responses for group in groups} for groups in (before, after))
    names = [f"update {groups[0].step}" for groups in (before, after)]
    both = [prompt for prompt in first if prompt in second]
    if not both:
        print(f"no logged prompt is in both {names[0]} and {names[1]}: prompts come again in the next epoch")
        return
    means = {prompt: [fmean(one.reward for one in side[prompt]) for side in (first, second)] for prompt in both}
    both.sort(key=lambda prompt: abs(means[prompt][1] - means[prompt][0]), reverse=True)
    columns = [Column("end of prompt", ratio=2), Column("mean reward", justify="right")]
    columns += [column for name in names for column in (Column(name, ratio=3), Column("reward", justify="right"))]
    title = f"from {names[0]} to {names[1]}: most changed of the {len(both)} logged prompts in both"
    table = Table(*columns, title=title)
    for prompt in both[:count]:
        table.add_section()
        start = shown(prompt_end(prompt)), "{:.4g} to {:.4g}".format(*means[prompt])
        for pair in zip_longest(first[prompt], second[prompt]):
            cells = [("", "") if one is None else (shown(one.text), f"{one.reward:.4g}") for one in pair]
            table.add_row(*start, *cells[0], *cells[1])
            start = Text(""), ""
    console.print(table)


def shown(text: str) -> Text:
    """Text as it is: a string in a table may hold rich's markup."""
    return Text(visible(text.strip()))
