"""Win rates of checkpoints against each other. `fastp3o win_rate --help` explains every option.

fastp3o win_rate --models runs/p3o/model,runs/ppo/model --prompts data.jsonl --reward runs/rm/model
fastp3o win_rate --models runs/p3o/model,runs/ppo/model,runs/dpo/model --prompts data.jsonl --judge judge:best
"""

import json
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fastp3o.cli import parse
from fastp3o.errors import UserError
from fastp3o.evaluation.config import WinRateConfig

if TYPE_CHECKING:
    from fastp3o.evaluation.verdicts import WinRate
    from fastp3o.evaluation.win_rates import Responses

    # Win rates by "reward" and "judge", of pairs of checkpoints by their numbers.
    Rates = dict[str, dict[tuple[int, int], WinRate]]


def main() -> None:
    print_win_rates(parse(WinRateConfig))


def print_win_rates(config: WinRateConfig) -> None:
    # These take seconds, which --help does without.
    from transformers.utils.logging import disable_progress_bar

    from fastp3o.calls.endpoint import EndpointError
    from fastp3o.evaluation.judge import load_judge
    from fastp3o.evaluation.win_rates import responses_of_all, win_rates

    disable_progress_bar()  # of loading weights, which would break up what is printed
    if config.output:
        require_place(Path(config.output))
    judge = load_judge(config, Path(config.verdicts) if config.verdicts else None)
    responses = responses_of_all(config)
    rates: Rates = {}
    try:
        for first, second in combinations(range(len(responses)), 2):
            for name, rate in win_rates(config, judge, responses[first], responses[second]):
                rates.setdefault(name, {})[first, second] = rate
    except EndpointError as error:
        raise EndpointError(
            f"{error}; with --verdicts FILE the next run continues from the verdicts so far"
        ) from error
    finally:
        if rates:
            print_table(config, rates, responses)
            if config.output:
                write(config, rates, responses)


def require_place(output: Path) -> None:
    """Makes the folder of a file that is written at the end."""
    if output.is_dir():
        raise UserError(f"--output {output} is a folder, and must be a file")
    output.parent.mkdir(parents=True, exist_ok=True)


def print_table(config: WinRateConfig, rates: "Rates", responses: "list[Responses]") -> None:
    """A row for each pair of checkpoints, by the reward and by the judge."""
    table = Table(title="win rates of the first", caption="ties count half; interval over prompts")
    for column in ("first", "second", "by"):
        table.add_column(column, overflow="fold")
    for column in (
        "win rate",
        "95% interval",
        "at equal length",
        "wins",
        "ties",
        "losses",
        "no verdict",
        "prompts",
    ):
        table.add_column(column, justify="right")
    for name, by_pair in rates.items():
        for pair, rate in by_pair.items():
            counts = (rate.wins, rate.ties, rate.losses, rate.missing, rate.prompts)
            controlled = "" if rate.length_controlled is None else f"{rate.length_controlled:.3f}"
            shares = (f"{rate.win_rate:.3f}", f"{rate.low:.3f} to {rate.high:.3f}", controlled)
            table.add_row(
                *(config.checkpoints[number] for number in pair), name, *shares, *map(str, counts)
            )
    Console(width=140).print(table, markup=False)
    for name, side in zip(config.checkpoints, responses, strict=True):
        print(f"tokens per response: {side.mean_tokens:.1f} of {name}")


def write(config: WinRateConfig, rates: "Rates", responses: "list[Responses]") -> None:
    from fastp3o.files import write_file

    names, tokens = config.checkpoints, [side.mean_tokens for side in responses]
    pairs = []
    for pair in sorted({pair for by_pair in rates.values() for pair in by_pair}):
        known = {by: asdict(by_pair[pair]) for by, by_pair in rates.items() if pair in by_pair}
        pairs.append({"first": names[pair[0]], "second": names[pair[1]], "win_rates": known})
    tokens_per_response = dict(zip(names, tokens, strict=True))
    result = {"config": asdict(config), "pairs": pairs, "tokens_per_response": tokens_per_response}
    write_file(Path(config.output or ""), json.dumps(result, indent=2) + "\n")
    print(f"result: {config.output}")
