"""Writes sums of two numbers, each with a demonstration and the answer: a task whose reward is known, not learnt.

{"prompt": "07+35=", "label": "24", "answer": 42}: numbers that are added are as long as the largest, so that each digit
has its place, and some demonstrations have the digits of the answer in reverse, which is for a reward to find out.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

from fastp3o.config import Flags, parse
from fastp3o.script import run_script
from fastp3o.training.durable import write_file


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig(Flags):
    """Sums of two numbers, some of which are held out for evaluation."""

    output_dir: str = field(metadata={"help": "Folder of the two files, sums.train.jsonl and sums.eval.jsonl."})
    largest: int = field(default=49, metadata={"help": "Largest number that is added."})
    held_out: int = field(default=200, metadata={"help": "Sums of the evaluation, which training does not have."})
    reversed_share: float = field(
        default=0.5, metadata={"help": "Share of the demonstrations with the digits of the answer in reverse."}
    )
    seed: int = field(default=0, metadata={"help": "Seed of the order, of which are held out, and which in reverse."})

    def __post_init__(self) -> None:
        self.check_at_least(1, "largest", "held_out")
        self.check_at_least(0, "seed")
        self.check(0 <= self.reversed_share <= 1, "reversed_share", "between 0 and 1")
        sums = (self.largest + 1) ** 2
        self.check(self.held_out < sums, "held_out", f"fewer than there are sums ({sums})")


def main(config: ArithmeticConfig) -> None:
    numbers = range(config.largest + 1)
    sums = [(first, second) for first in numbers for second in numbers]
    rng = random.Random(config.seed)
    rng.shuffle(sums)
    records = [record(*pair, len(str(config.largest)), rng.random() < config.reversed_share) for pair in sums]
    folder = Path(config.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("eval", records[: config.held_out]), ("train", records[config.held_out :])):
        write_file(folder / f"sums.{split}.jsonl", "".join(json.dumps(one) + "\n" for one in chosen))
        print(f"{len(chosen)} sums in {folder / f'sums.{split}.jsonl'}")


def record(first: int, second: int, width: int, in_reverse: bool) -> dict[str, str | int]:
    answer = first + second
    label = str(answer)[::-1] if in_reverse else str(answer)
    return {"prompt": f"{first:0{width}}+{second:0{width}}=", "label": label, "answer": answer}


if __name__ == "__main__":
    run_script(lambda: main(parse(ArithmeticConfig)))
