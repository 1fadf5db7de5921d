"""Prompts with their responses -> packed rows: one behind the other, nothing padded, a shared prompt once.

A group is a prompt with its K responses, a pair where K is 2. With shared prompts it lies in a row as

    [x, y1, y2]         queries x+y1 see the keys x+y1, queries y2 the keys x+y2

and without as [x, y1], [x, y2]. An index gathers the keys of a row, so that each segment of queries has its keys in one
piece. Positions of every response begin at len(x), and its first token is predicted by the last token of x.

T tokens of a row, S responses in it, N scored tokens, G segments, U gathered keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

Ids = list[int]


class OnDevices:
    """A dataclass whose tensors move together."""

    def to(self, device: torch.device) -> Any:
        return type(self)(**{field.name: moved(getattr(self, field.name), device) for field in fields(self)})


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor | OnDevices):
        return value.to(device)
    return tuple(moved(part, device) for part in value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class SharedKeys(OnDevices):
    """Where keys come from when several segments see the same prompt."""

    rows: Tensor  # [U] int64, the token of the row behind each key
    own: Tensor  # [T] int64, the key that lies in a token's own segment
    # For each further response of a group: tokens of the row that its segment sees too, and the keys they are there.
    # No token comes twice in one of them, so adding up their gradients is deterministic.
    again: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Segments(OnDevices):
    """Segment g's queries are tokens cu_queries[g] to cu_queries[g + 1], its keys cu_keys[g] to cu_keys[g + 1].

    Queries see the keys up to their own position, aligned at the end: the last query sees every key of its segment.
    """

    cu_queries: Tensor  # [G + 1] int32
    cu_keys: Tensor  # [G + 1] int32
    query_lengths: tuple[int, ...]  # the same on the host
    key_lengths: tuple[int, ...]
    shared: SharedKeys | None  # None where the keys are the tokens themselves


@dataclass(frozen=True)
class PackedRow(OnDevices):
    """One row as a model takes it, and which of its tokens predict what."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    segments: Segments
    scored_at: Tensor  # [N] int64, tokens of the row whose hidden state predicts a scored token
    labels: Tensor  # [N] int64, the scored tokens
    cu_seqlens: Tensor  # [S + 1] int32, where each response's scored tokens begin in [N]
    scored_lengths: tuple[int, ...]  # their lengths on the host
    ends_at: Tensor  # [S] int64, each response's last token in the row
    sequences: tuple[int, ...]  # which response each of the S is, counted over all groups
    responses_per_prompt: int | None  # None where groups differ in it

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def cu_seqlens_on_host(self) -> Tensor:
        """The same offsets on the CPU, wherever the row is: losses cut their chunks without waiting for a device."""
        return offsets(self.scored_lengths)


def pack(
    prompts: Sequence[Ids],
    responses: Sequence[Sequence[Ids]],
    *,
    tokens_per_row: int,
    share_prompts: bool = True,
    score_prompts: bool = False,
    sequences: Sequence[int] | None = None,
) -> list[PackedRow]:
    """Packs groups into as few rows of `tokens_per_row` tokens as first-fit decreasing finds.

    Groups stay whole: one that is longer gets a row of its own, longer than the rest. Scored are the responses' tokens,
    end-of-sequence included; with `score_prompts` (one response each) the prompt's too, but for the first, which
    nothing predicts. `sequences` numbers the responses; if not given, they are counted.

    Raises ValueError for an empty prompt or response, naming its group.
    """
    for g, (prompt, of_prompt) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt or not of_prompt or not all(of_prompt):
            lengths = [len(response) for response in of_prompt]
            raise ValueError(f"group {g} has {len(prompt)} prompt tokens and responses of {lengths}; each needs one")
        if score_prompts and len(of_prompt) != 1:
            raise ValueError(f"group {g} has {len(of_prompt)} responses; a scored prompt has one")
    layout = shared_layout if share_prompts else plain_layout
    sizes = [
        group_tokens(len(prompt), list(map(len, of_prompt)), share_prompts=share_prompts)
        for prompt, of_prompt in zip(prompts, responses, strict=True)
    ]
    first_sequence = [0, *accumulate(map(len, responses))]
    numbers = range(first_sequence[-1]) if sequences is None else sequences
    return [
        lay_out(
            [prompts[g] for g in groups],
            [responses[g] for g in groups],
            [s for g in groups for s in numbers[first_sequence[g] : first_sequence[g + 1]]],
            layout,
            score_prompts,
        )
        for groups in first_fit_decreasing(sizes, tokens_per_row)
    ]


def by_prompt(prompts: Sequence[Ids], responses: Sequence[Ids]) -> tuple[list[Ids], list[list[Ids]]]:
    """Groups of adjacent responses to equal prompts."""
    groups = [list(group) for _, group in groupby(zip(prompts, responses, strict=True), key=itemgetter(0))]
    return [group[0][0] for group in groups], [[response for _, response in group] for group in groups]


def in_groups(prompts: Sequence[Ids], responses: Sequence[Ids], size: int) -> tuple[list[Ids], list[list[Ids]]]:
    """Groups of `size` adjacent responses each."""
    return list(prompts[::size]), [list(responses[s : s + size]) for s in range(0, len(responses), size)]


def in_order(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> Tensor:
    """Values of the rows' responses, [S] each, in the order in which the responses were given to `pack`."""
    order = torch.tensor([s for row in rows for s in row.sequences])
    return torch.cat(list(values))[order.argsort().to(values[0].device)]


def group_tokens(prompt_length: int, response_lengths: Sequence[int], *, share_prompts: bool) -> int:
    """Tokens that a group takes in a row."""
    return prompt_length * (1 if share_prompts else len(response_lengths)) + sum(response_lengths)


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices; the largest first, each into the first bin with room. Ties keep their order."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        fits = next((b for b, left in enumerate(room) if left >= sizes[index]), None)
        if fits is None:
            fits = len(bins)
            bins.append([])
            room.append(capacity)
        bins[fits].append(index)
        room[fits] -= sizes[index]
    return bins


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Splits indices into `parts` lists of equally many, with sums of sizes as even as a greedy choice makes them.

    Raises ValueError where the indices do not divide evenly.
    """
    if len(sizes) % parts:
        raise ValueError(f"{len(sizes)} groups cannot be split evenly into {parts} parts")
    members: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        open_parts = (p for p in range(parts) if len(members[p]) < len(sizes) // parts)
        lightest = min(open_parts, key=lambda p: sums[p])
        members[lightest].append(index)
        sums[lightest] += sizes[index]
    return [sorted(part) for part in members]


def efficiency(rows: Sequence[PackedRow], tokens_per_row: int) -> float:
    """Share of the rows' room that holds tokens; the rest is room left, never padding that is computed."""
    return sum(row.tokens for row in rows) / sum(max(row.tokens, tokens_per_row) for row in rows)


@dataclass
class Segment:
    """Tokens that attend as one sequence: `seen` tokens of the row before `start`, then their own."""

    ids: Ids
    first_position: int
    scored_from: int  # the first of `ids` that is scored
    seen: range  # tokens of the row, the shared prompt
    predicted_by: int | None  # the token of the row that predicts the first of `ids`, where that is scored


Layout = Callable[[Ids, Sequence[Ids], int, bool], list[Segment]]


def shared_layout(prompt: Ids, responses: Sequence[Ids], start: int, score_prompt: bool) -> list[Segment]:
    segments = [whole_segment(prompt, responses[0], score_prompt)]
    last_of_prompt = start + len(prompt) - 1
    for response in responses[1:]:
        segments.append(Segment(response, len(prompt), 0, range(start, last_of_prompt + 1), last_of_prompt))
    return segments


def plain_layout(prompt: Ids, responses: Sequence[Ids], start: int, score_prompt: bool) -> list[Segment]:
    return [whole_segment(prompt, response, score_prompt) for response in responses]


def whole_segment(prompt: Ids, response: Ids, score_prompt: bool) -> Segment:
    return Segment([*prompt, *response], 0, 1 if score_prompt else len(prompt), range(0), None)


def lay_out(
    prompts: Sequence[Ids],
    responses: Sequence[Sequence[Ids]],
    sequences: Sequence[int],
    layout: Layout,
    score_prompts: bool,
) -> PackedRow:
    """The tensors of one row."""
    input_ids: Ids = []
    positions: list[int] = []
    scored_at: list[int] = []
    labels: Ids = []
    scored_lengths: list[int] = []
    ends_at: list[int] = []
    query_lengths: list[int] = []
    key_rows: list[int] = []
    key_lengths: list[int] = []
    own: list[int] = []
    again: list[tuple[list[int], list[int]]] = []
    for prompt, of_prompt in zip(prompts, responses, strict=True):
        for k, segment in enumerate(layout(prompt, of_prompt, len(input_ids), score_prompts)):
            start, length = len(input_ids), len(segment.ids)
            input_ids += segment.ids
            positions += range(segment.first_position, segment.first_position + length)

            scored = segment.ids[segment.scored_from :]
            first = start + segment.scored_from - 1 if segment.predicted_by is None else segment.predicted_by
            scored_at += [first, *range(start + segment.scored_from, start + length - 1)]
            labels += scored
            scored_lengths.append(len(scored))
            ends_at.append(start + length - 1)

            query_lengths.append(length)
            key_lengths.append(len(segment.seen) + length)
            if segment.seen:
                again += [([], []) for _ in range(k - len(again))]
                tokens, keys = again[k - 1]
                tokens += segment.seen
                keys += range(len(key_rows), len(key_rows) + len(segment.seen))
                key_rows += segment.seen
            own += range(len(key_rows), len(key_rows) + length)
            key_rows += range(start, start + length)
    shared = None
    if again:
        pairs = tuple((torch.tensor(tokens), torch.tensor(keys)) for tokens, keys in again)
        shared = SharedKeys(torch.tensor(key_rows), torch.tensor(own), pairs)
    return PackedRow(
        input_ids=torch.tensor([input_ids]),
        position_ids=torch.tensor([positions]),
        segments=Segments(
            cu_queries=offsets(query_lengths),
            cu_keys=offsets(key_lengths),
            query_lengths=tuple(query_lengths),
            key_lengths=tuple(key_lengths),
            shared=shared,
        ),
        scored_at=torch.tensor(scored_at),
        labels=torch.tensor(labels),
        cu_seqlens=offsets(scored_lengths),
        scored_lengths=tuple(scored_lengths),
        ends_at=torch.tensor(ends_at),
        sequences=tuple(sequences),
        responses_per_prompt=len(responses[0]) if len(set(map(len, responses))) == 1 else None,
    )


def offsets(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
