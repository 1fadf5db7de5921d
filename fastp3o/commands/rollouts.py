"""The best and the worst responses of an update, and the prompts that changed most between two updates.

fastp3o rollouts runs/p3o
fastp3o rollouts runs/p3o --update 10 --compare 40

Reads rollouts.jsonl, or rollouts.jsonl.gz, of a run, also while it trains.
"""

import argparse
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastp3o.errors import UserError, visible
from fastp3o.run.log import LoggedGroup, LoggedResponse, compressed, prompt_end, read_updates
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
    try:
        logged = read_logged(arguments.run / ROLLOUTS, arguments.update, arguments.compare)
    except UserError as error:
        parser.error(str(error))
    console = Console() if Console().is_terminal else Console(width=WIDTH)
    if logged.other is None:
        print_extremes(console, logged.shown, arguments.count)
    else:
        print_changes(console, logged.shown, logged.other, arguments.count)


class Logged(NamedTuple):
    """The groups of the update that is shown, and of the one that it is compared with, if there is one."""

    shown: list[LoggedGroup]
    other: list[LoggedGroup] | None


def read_logged(path: Path, update: int | None, other: int | None) -> Logged:
    """update: None for the last one. other: None for none. Raises UserError if the file or an update is missing."""
    if not any(one.is_file() for one in (path, compressed(path))):
        raise UserError(f"{path} does not exist: give the folder of an online run that logs rollouts (--log_rollouts)")
    steps: list[int] = []
    found: dict[int, list[LoggedGroup]] = {}
    for groups in read_updates(path):
        steps.append(groups[0].step)
        if steps[-1] in (update, other):
            found[steps[-1]] = groups
        last = groups
    if not steps:
        raise UserError(f"{path} holds no whole update yet")
    if update is None:
        update = last[0].step
        found[update] = last
    if missing := [wanted for wanted in (update, other) if wanted is not None and wanted not in found]:
        raise UserError(f"{path} has no update {missing[0]}; it has {in_words(steps)}")
    if update == other:
        raise UserError(f"--compare must be another update than --update, got {update} twice")
    return Logged(found[update], None if other is None else found[other])


def in_words(steps: Sequence[int]) -> str:
    """Such as "1, 3, 9", or "10, 20, ..., 500" for many at one distance."""
    even = list(steps) == list(range(steps[0], steps[-1] + 1, max(steps[1] - steps[0], 1))) if len(steps) > 4 else False
    return f"{steps[0]}, {steps[1]}, ..., {steps[-1]}" if even else ", ".join(map(str, steps))


def print_extremes(console: Console, groups: list[LoggedGroup], count: int) -> None:
    """Prints the responses of an update with the highest and with the lowest rewards."""
    responses = [(group, response) for group in groups for response in group.responses]
    responses.sort(key=lambda one: one[1].reward, reverse=True)
    for kind, chosen in (("best", responses[:count]), ("worst", responses[::-1][:count])):
        table = Table(title=f"update {groups[0].step}: {kind} of {len(responses)} logged responses", show_lines=True)
        table.add_column("end of prompt", ratio=2)
        table.add_column("response", ratio=3)
        for column in ("reward", "log-ratio", "tokens"):
            table.add_column(column, justify="right")
        for group, response in chosen:
            ratio = "–" if response.log_ratio is None else f"{response.log_ratio:.3g}"
            tokens = f"{len(response.ids)}{'' if response.finished else ', cut'}"
            cells = (f"{response.reward:.4g}", ratio, tokens)
            table.add_row(prompt_text(group), response_text(response), *cells)
        console.print(table)


def print_changes(console: Console, shown: list[LoggedGroup], other: list[LoggedGroup], count: int) -> None:
    """Prints the prompts of two updates whose mean rewards changed most, with their responses in both."""
    first, second = ({group.prompt: group for group in groups} for groups in (shown, other))
    names = [f"update {groups[0].step}" for groups in (shown, other)]
    both = [(first[prompt], second[prompt]) for prompt in first if prompt in second]
    if not both:
        print(f"no logged prompt is in both {names[0]} and {names[1]}: prompts come again in the next epoch")
        return
    both.sort(key=lambda pair: abs(mean_reward(pair[1]) - mean_reward(pair[0])), reverse=True)
    title = f"from {names[0]} to {names[1]}: most changed of the {len(both)} logged prompts in both"
    table = Table(title=title)
    table.add_column("end of prompt", ratio=2)
    table.add_column("mean reward", justify="right")
    for name in names:
        table.add_column(name, ratio=3)
        table.add_column("reward", justify="right")
    for before, after in both[:count]:
        table.add_section()
        change = f"{mean_reward(before):.4g} to {mean_reward(after):.4g}"
        for k, responses in enumerate(zip_longest(before.responses, after.responses)):
            start = (Text(""), "") if k else (prompt_text(before), change)
            cells = [cell for one in responses for cell in response_and_reward(one)]
            table.add_row(*start, *cells)
    console.print(table)


def mean_reward(group: LoggedGroup) -> float:
    return fmean(response.reward for response in group.responses)


def response_and_reward(response: LoggedResponse | None) -> tuple[Text, str]:
    """response: None where the other update has more."""
    return (Text(""), "") if response is None else (response_text(response), f"{response.reward:.4g}")


def prompt_text(group: LoggedGroup) -> Text:
    return Text(visible(prompt_end(group.prompt)))


def response_text(response: LoggedResponse) -> Text:
    """Text is shown as it is: a string in a table may hold rich's markup."""
    return Text(visible(response.text.strip()))
