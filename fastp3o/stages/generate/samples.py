"""Sampled responses with their rewards: samples.jsonl, a line a prompt, appended batch by batch."""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from fastp3o.data.layouts import Message
from fastp3o.rollouts.groups import Group
from fastp3o.training.durable import naming, sync


@dataclass(frozen=True)
class Samples:
    """K responses to one prompt.

    number: the prompt's, from 0. prompt: as the data have it, text or messages. responses: texts. lengths: in tokens.
    finished: whether the response ended with an end-of-sequence. rewards: none without a reward.
    """

    number: int
    prompt: str | list[Message]
    responses: list[str]
    lengths: list[int]
    finished: list[bool]
    rewards: list[float]


def make_samples(group: Group, rewards: list[float], given: str) -> Samples:
    """given: the prompt as the data have it, in JSON."""
    return Samples(
        group.prompt.number,
        json.loads(given),
        [response.text for response in group.responses],
        [len(response.ids) for response in group.responses],
        [response.finished for response in group.responses],
        rewards,
    )


class SamplesFile:
    """The samples of prompts 0, 1, ... in order.

    Lines are synced a batch at a time. Whatever ended the process, the file begins with whole batches; lines after them
    are cut off before a resumed run goes on.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[Samples]:
        with self.path.open(encoding="utf-8") as lines:
            for line in lines:
                yield Samples(**json.loads(line))

    def append(self, samples: Sequence[Samples]) -> None:
        text = "".join(json.dumps(asdict(one), ensure_ascii=False, allow_nan=False) + "\n" for one in samples)
        with naming(self.path), self.path.open("ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    def whole_batches(self, batch_size: int, total: int) -> int:
        """Number of prompts in whole batches. total: of all; the last batch may have fewer than `batch_size`."""
        done = min(sum(1 for _ in self.line_ends()), total)
        return done if done == total else done // batch_size * batch_size

    def cut_after(self, prompts: int) -> None:
        """Leaves the lines of this many prompts."""
        ends = [0, *islice(self.line_ends(), prompts)]
        with self.path.open("ab") as file:
            file.truncate(ends[prompts])
            os.fsync(file.fileno())
        sync(self.path.parent)

    def line_ends(self) -> Iterator[int]:
        """Yields the end of each prompt's line in the file, up to the first damaged line."""
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
