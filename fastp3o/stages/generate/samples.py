"""Sampled responses with their rewards: samples.jsonl, a line a prompt, appended batch by batch."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor

from fastp3o.data.layouts import Message
from fastp3o.rollouts.rollouts import Rollouts
from fastp3o.training.durable import sync


@dataclass(frozen=True)
class Samples:
    """K responses to one prompt.

    number: of the prompt, from 0. prompt: as the data have it, text or messages. responses: texts. lengths: in tokens.
    finished: whether the response ended with an end-of-sequence.
    """

    number: int
    prompt: str | list[Message]
    responses: list[str]
    lengths: list[int]
    finished: list[bool]
    rewards: list[float]


def samples_of(rollouts: Rollouts, rewards: Tensor, numbers: Sequence[int], given: Sequence[str]) -> list[Samples]:
    """rewards: [P, K] fp32. numbers: of the prompts. given: the prompts as the data have them, in JSON."""
    columns = (rollouts.responses, rollouts.response_lengths, rollouts.finished, rewards.tolist())
    return [Samples(*one) for one in zip(numbers, map(json.loads, given), *columns, strict=True)]


class SamplesFile:
    """The samples of prompts 0, 1, ... in order.

    Lines are synced a batch at a time. Whatever ended the process, the file begins with whole batches, and what comes
    behind them is cut off before it is gone on with.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[Samples]:
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                yield Samples(**json.loads(line))

    def append(self, samples: Sequence[Samples]) -> None:
        text = "".join(json.dumps(asdict(one), ensure_ascii=False, allow_nan=False) + "\n" for one in samples)
        with self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def whole_batches(self, batch_size: int, total: int) -> int:
        """The number of prompts in them. total: prompts in all; the last batch may have fewer than `batch_size`."""
        done = min(sum(1 for _ in self.ends_of_lines()), total)
        return done if done == total else done // batch_size * batch_size

    def cut_behind(self, prompts: int) -> None:
        """Leaves the lines of the first so many prompts."""
        ends = [0, *islice(self.ends_of_lines(), prompts)]
        with self.path.open("ab") as file:
            file.truncate(ends[prompts])
            os.fsync(file.fileno())
        sync(self.path.parent)

    def ends_of_lines(self) -> Iterator[int]:
        """Where in the file the line of each prompt ends, up to the first that is none."""
        if not self.path.exists():
            return
        end = 0
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines):
                try:
                    whole = line.endswith(b"\n") and Samples(**json.loads(line)).number == number
                except (ValueError, TypeError):
                    whole = False
                if not whole:
                    return
                end += len(line)
                yield end
