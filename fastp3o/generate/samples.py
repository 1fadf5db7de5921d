"""Sampled responses with their rewards: samples.jsonl, a line a prompt, appended batch by batch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from fastp3o.data.layouts import Message
from fastp3o.data.tokens import Continuation
from fastp3o.files import sync
from fastp3o.generate.read_back import ReadsBack
from fastp3o.rollouts.groups import Group, Prompt, Response, lengths
from fastp3o.run import log


@dataclass(frozen=True)
class Samples:
    """K responses to one prompt.

    number: the prompt's, from 0. prompt: as the data have it, text or messages. template_fields:
    the record's `tools` and `chat_template_kwargs`. responses: texts. lengths: in the policy's
    tokens. finished: whether the response ended with an end-of-sequence. rewards: none without a
    reward. read_back: whether the response, of a trajectory its last turn, is read as the tokens
    that were sampled if it is data. turns: of trajectories, with their texts, and each with its own
    `read_back`.
    """

    number: int
    prompt: str | list[Message]
    template_fields: dict[str, Any]
    responses: list[str]
    lengths: list[int]
    finished: list[bool]
    rewards: list[float]
    read_back: list[bool]
    turns: list[list[dict[str, Any]]] = field(default_factory=list)


def make_samples(
    group: Group,
    rewards: list[float],
    given: str,
    *,
    continuation: Continuation,
    reads_back: ReadsBack,
) -> Samples:
    """given: the prompt and its template's fields as the data have them, in JSON."""
    record, responses, turns = json.loads(given), group.responses, []
    for response in responses:
        if response.turns:
            alone = turns_alone(group.prompt, response, continuation)
            about = zip(response.turns, alone, reads_back(record, alone), strict=True)
            turns.append(
                [
                    turn._asdict() | {"text": one.text, "read_back": back}
                    for turn, one, back in about
                ]
            )
    read_back = [its[-1]["read_back"] for its in turns] or reads_back(record, responses)
    return Samples(
        group.prompt.number,
        record.pop("prompt"),
        record,
        [response.text for response in responses],
        lengths([group])[0].int().tolist(),
        [response.finished for response in responses],
        rewards,
        read_back,
        turns,
    )


def turns_alone(prompt: Prompt, trajectory: Response, continuation: Continuation) -> list[Response]:
    """Each turn of the policy as a response. Only the last one may be cut."""
    alone = []
    for turn in trajectory.turns:
        ids = trajectory.ids[turn.start : turn.end]
        before = [*prompt.ids, *trajectory.ids[: turn.start]]
        finished = trajectory.finished or turn is not trajectory.turns[-1]
        alone.append(Response(ids, continuation.text(ids, before[-1]), finished))
    return alone


class SamplesFile:
    """The samples of prompts 0, 1, ... in order. Lines are synced a batch at a time. Whatever ended
    the process, the file begins with whole batches; lines after them are cut off before a resumed
    run continues.
    """

    def __init__(self, path: Path):
        self.path = path

    def __iter__(self) -> Iterator[Samples]:
        return (Samples(**values) for values in log.read(self.path, key="number"))

    def append(self, samples: Sequence[Samples]) -> None:
        log.append(self.path, map(asdict, samples))
        sync(self.path)
        sync(self.path.parent)

    def whole_batches(self, batch_size: int, total: int) -> int:
        """Number of prompts in whole batches. total: of all; the last batch may have fewer than
        `batch_size`.
        """
        names, done = {field.name for field in fields(Samples)}, 0
        for values in log.read(self.path, key="number"):
            if done == total or values.keys() != names or values["number"] != done:
                break
            done += 1
        return done if done == total else done // batch_size * batch_size

    def cut_after(self, prompts: int) -> None:
        """Leaves the lines of this many prompts."""
        log.cut_after(self.path, prompts - 1, key="number")
