"""rollouts.jsonl.gz: prompts of an update with the responses that were sampled, a line of JSON for each prompt.

The lines of an update are a gzip member of their own: a run that is killed loses at most the last one, and zcat reads
the file as a whole.
"""

import json
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fastp3o.training.durable import naming

GZIP = 31  # zlib's number for its format
# The header that zlib writes: without a name and a time. By chance it stands once in 2**64 bytes.
HEADER = re.compile(rb"(?=\x1f\x8b\x08\0\0\0\0\0)")


@dataclass(frozen=True)
class LoggedResponse:
    """One response. A part or a log-ratio that is not finite is None.

    ids: with the end-of-sequence if it was sampled. reward: unscaled, less penalties. parts: rewards that it is the sum
    of, unweighted, and penalties, by the names of their metrics. log_ratio: log π_old(y|x) − log π_ref(y|x) in nats.
    finished: whether it ended with an end-of-sequence; otherwise it was cut.
    """

    text: str
    ids: list[int]
    reward: float
    parts: dict[str, float | None]
    log_ratio: float | None
    finished: bool


@dataclass(frozen=True)
class LoggedGroup:
    """A prompt of an update with its responses. kl: mean log-ratio of those that the policy sampled, in nats."""

    step: int
    prompt: str
    kl: float | None
    responses: list[LoggedResponse]


def append_groups(path: Path, groups: Sequence[LoggedGroup]) -> None:
    """Adds the groups of an update."""
    lines = "".join(json.dumps(asdict(group), allow_nan=False) + "\n" for group in groups)
    with naming(path), path.open("ab") as file:
        file.write(zlib.compress(lines.encode(), wbits=GZIP))


def read_updates(path: Path) -> Iterator[list[LoggedGroup]]:
    """Yields the groups of one update after the other. An update that is damaged, such as one that is being written, is
    left out.
    """
    for member in members(path.read_bytes()):
        if member.is_whole:
            yield [read_group(json.loads(line)) for line in member.text.splitlines()]


def read_group(values: dict[str, Any]) -> LoggedGroup:
    return LoggedGroup(**values | {"responses": [LoggedResponse(**response) for response in values["responses"]]})


class Member(NamedTuple):
    """A gzip member. text: what it holds, cut if it is not whole."""

    content: bytes
    text: bytes
    is_whole: bool


def members(content: bytes) -> Iterator[Member]:
    """Splits a compressed log. A member that is cut or changed is not whole, and neither are bytes that are none."""
    for part in filter(None, HEADER.split(content)):
        reader = zlib.decompressobj(wbits=GZIP)
        try:
            text = reader.decompress(part)
        except zlib.error:
            yield Member(part, b"", is_whole=False)
            continue
        rest = reader.unused_data
        yield Member(part[: len(part) - len(rest)], text, is_whole=reader.eof)
        if rest:
            yield Member(rest, b"", is_whole=False)
