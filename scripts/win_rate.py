"""The win rate of one checkpoint against another. `python scripts/win_rate.py --help` explains every option.

python scripts/win_rate.py --first runs/p3o/model --second runs/ppo/model --prompts data.jsonl --reward runs/rm/model
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from fastp3o.config import parse
from fastp3o.evaluation.config import WinRateConfig
from fastp3o.script import run_script

if TYPE_CHECKING:
    from fastp3o.evaluation.verdicts import WinRate
    from fastp3o.evaluation.win_rates import Responses


def main(config: WinRateConfig) -> None:
    # These take seconds, which --help does without.
    from transformers.utils.logging import disable_progress_bar

    from fastp3o.endpoint import EndpointError
    from fastp3o.evaluation.win_rates import head_to_head, load_judge, win_rates

    disable_progress_bar()  # of loading weights, which would break up what is printed
    judge = load_judge(config)
    responses = head_to_head(config)
    rates: dict[str, WinRate] = {}
    try:
        for name, rate in win_rates(config, judge, *responses):
            rates[name] = rate
    except EndpointError as error:
        raise EndpointError(
            f"{error}; no win rate by the judge. With --verdicts FILE the next run continues from the verdicts so far"
        ) from error
    finally:
        if rates:
            print_table(config, rates, responses)
            if config.output:
                write(config, rates, responses)


def print_table(config: WinRateConfig, rates: "dict[str, WinRate]", responses: "tuple[Responses, Responses]") -> None:
    table = Table(title=f"{config.first} against {config.second}", caption="ties count half; interval over prompts")
    for column in ("by", "win rate", "95% interval", "wins", "ties", "losses", "no verdict", "prompts"):
        table.add_column(column, justify="left" if column == "by" else "right")
    for name, rate in rates.items():
        counts = (rate.wins, rate.ties, rate.losses, rate.missing, rate.prompts)
        table.add_row(name, f"{rate.win_rate:.3f}", f"{rate.low:.3f} to {rate.high:.3f}", *map(str, counts))
    Console(width=110).print(table, markup=False)
    first, second = (side.mean_tokens for side in responses)
    print(f"tokens per response: {first:.1f} of the first, {second:.1f} of the second")


def write(config: WinRateConfig, rates: "dict[str, WinRate]", responses: "tuple[Responses, Responses]") -> None:
    result = {
        "config": asdict(config),
        "win_rates": {name: asdict(rate) for name, rate in rates.items()},
        "tokens_per_response": dict(zip(("first", "second"), (side.mean_tokens for side in responses), strict=True)),
    }
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"result: {output}")


if __name__ == "__main__":
    run_script(lambda: main(parse(WinRateConfig)))
