"""Writes sums of two numbers with their answers: a task whose reward is known, not learnt.

Each record has a prompt ("17+25="), and the answer as what follows it and as a number.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fastp3o.config import Flags, parse
from fastp3o.script import run_script
from fastp3o.training.durable import write_file


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(Flags):
    """Sums of two numbers, some of which are held out for evaluation."""

    output_dir: str = field(metadata={"help": "Folder of the two files, sums.train.jsonl and sums.eval.jsonl."})
    largest: int = field(default=99, metadata={"help": "Largest number that is added."})
    held_out: int = field(default=500, metadata={"help": "Sums of the evaluation, which training does not have."})
    seed: int = field(default=0, metadata={"help": "Seed of the order and of which sums are held out."})

    def __post_init__(self) -> None:
        self.check_at_least(1, "largest", "held_out")
        self.check_at_least(0, "seed")
        sums = (self.largest + 1) ** 2
        self.check(self.held_out < sums, "held_out", f"fewer than there are sums ({sums})")


def main(config: ArithmeticConfig) -> None:
    numbers = range(config.largest + 1)
    sums = [(first, second) for first in numbers for second in numbers]
    random.Random(config.seed).shuffle(sums)
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("eval", sums[: config.held_out]), ("train", sums[config.held_out :])):
        write_file(folder / f"sums.{split}.jsonl", lines(chosen))
        print(f"{len(chosen)} sums in {folder / f'sums.{split}.jsonl'}")


def lines(sums: Iterable[tuple[int, int]]) -> str:
    records = ({"prompt": f"{a}+{b}=", "label": str(a + b), "answer": a + b} for a, b in sums)
    return "".join(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    run_script(lambda: main(parse(ArithmeticConfig)))
