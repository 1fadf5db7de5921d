"""Sampled responses with their rewards: samples.jsonl, a line a prompt, appended batch by batch."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from fastp3o.data.layouts import Message
from fastp3o.files import sync
from fastp3o.rollouts.groups import Group, lengths
from fastp3o.run import log


@dataclass(frozen=True)
class Samples:
    """K responses to one prompt.

    number: the prompt's, from 0. prompt: as the data have it, text or messages. template_fields: the record's `tools`
    and `chat_template_kwargs`. responses: texts. lengths: in the policy's tokens. finished: whether the response
    ended with an end-of-sequence. rewards: none without a reward. turns: of trajectories, with their texts.
    """

    number: int
    prompt: str | list[Message]
    template_fields: dict[str, Any]
    responses: list[str]
    lengths: list[int]
    finished: list[bool]
    rewards: list[float]
    turns: list[list[dict[str, Any]]] = field(default_factory=list)


def make_samples(group: Group, rewards: list[float], given: str, tokenizer: PreTrainedTokenizerBase) -> Samples:
    """given: the prompt and its template's fields as the data have them, in JSON."""
    template_fields = json.loads(given)
    responses, text = group.responses, partial(tokenizer.decode, skip_special_tokens=True)
    turns = [[t._asdict() | {"text": text(r.ids[t.start : t.end])} for t in r.turns] for r in responses if r.turns]
    return Samples(
        group.prompt.number,
        template_fields.pop("prompt"),
        template_fields,
        [response.text for response in responses],
        lengths([group])[0].int().tolist(),
        [response.finished for response in responses],
        rewards,
        turns,
    )


class SamplesFile:
    """The samples of prompts 0, 1, ... in order. Lines are synced a batch at a time. Whatever ended the process, the
    file begins with whole batches; lines after them are cut off before a resumed run goes on.
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
        """Number of prompts in whole batches. total: of all; the last batch may have fewer than `batch_size`."""
        names, done = {field.name for field in fields(Samples)}, 0
        for values in log.read(self.path, key="number"):
            if done == total or values.keys() != names or values["number"] != done:
                break
            done += 1
        return done if done == total else done // batch_size * batch_size

    def cut_after(self, prompts: int) -> None:
        """Leaves the lines of this many prompts."""
        log.cut_after(self.path, prompts - 1, key="number")
