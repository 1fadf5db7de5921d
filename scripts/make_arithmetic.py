"""Writes sums of two numbers with their answers: a task whose reward is known, not learnt.

Each sum comes twice, {"prompt": "7+5=", "label": "12", "answer": 12} and with the label "12.":
demonstrations of two forms, of which a reward may take one.
"""

import json
import random
from pathlib import Path

from fastp3o.cli import parse
from fastp3o.config import Flags, option, required
from fastp3o.files import write_file
from fastp3o.script import run_script


class ArithmeticConfig(Flags):
    """Sums of two numbers, each with demonstrations of two forms and its answer."""

    output: str = required("JSON Lines file to write.")
    largest: int = option(9, "Largest number in the sums.", at_least=1)
    seed: int = option(0, "Seed of the order.", at_least=0)


def main(config: ArithmeticConfig) -> None:
    numbers = range(config.largest + 1)
    records = [
        {
            "prompt": f"{first}+{second}=",
            "label": f"{first + second}{ending}",
            "answer": first + second,
        }
        for first in numbers
        for second in numbers
        for ending in ("", ".")
    ]
    random.Random(config.seed).shuffle(records)
    path = Path(config.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, "".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(numbers) ** 2} sums with two demonstrations each: {path}")


if __name__ == "__main__":
    run_script(lambda: main(parse(ArithmeticConfig)))
