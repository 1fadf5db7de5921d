"""Packs groups, a prompt with its responses each, into rows without padding."""

from collections.abc import Sequence
from dataclasses import replace

from fastp3o.errors import UserError
from fastp3o.packing.bins import first_fit_decreasing
from fastp3o.packing.packed_row import GivenGroup, Ids, PackedRow, Part, Spans, packed_row
from fastp3o.packing.settings import Packing


def pack(
    prompts: Sequence[Ids],
    responses: Sequence[Sequence[Ids]],
    packing: Packing,
    *,
    label_prompts: bool = False,
    groups: Sequence[int] | None = None,
    labeled: Sequence[Sequence[Spans] | None] | None = None,
) -> list[PackedRow]:
    """Packs groups into as few rows of `packing.tokens_per_row` tokens as first-fit decreasing
    finds.

    Groups stay whole: one that is longer gets a longer row of its own, which has `parts`. The
    responses' tokens are labeled, end-of-sequence included; with `label_prompts` (one response
    each) the prompt's too, except the first, which nothing predicts. groups: their numbers, by
    default 0, 1, ... labeled: the parts of responses that are, [P][K]; by default all.

    Raises ValueError for an empty prompt or response, naming its group.
    """
    for number, (prompt, group) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt or not group or not all(group):
            tokens = f"{len(prompt)} prompt tokens and responses of {list(map(len, group))}"
            raise UserError(f"group {number} has {tokens}; each needs one")
        if label_prompts and len(group) != 1:
            raise UserError(f"group {number} has {len(group)} responses; a labeled prompt has one")
    numbers = range(len(prompts)) if groups is None else groups
    rows = []
    for members in first_fit_decreasing(
        group_sizes(prompts, responses, packing), packing.tokens_per_row
    ):
        row_groups = [
            GivenGroup(prompts[m], responses[m], None if labeled is None else labeled[m])
            for m in members
        ]
        row = packed_row(
            [numbers[member] for member in members],
            row_groups,
            share_prompts=packing.share_prompts,
            label_prompts=label_prompts,
        )
        parts = parts_of(row_groups[0], packing)
        rows.append(replace(row, parts=parts, passes=len(parts)) if len(parts) > 1 else row)
    return rows


def parts_of(given: GivenGroup, packing: Packing) -> tuple[Part, ...]:
    """A group in as few parts of `packing.tokens_per_row` tokens, or of one response, as its order
    allows.
    """
    length = len(given.prompt)
    prompt_once, prompt_each = (length, 0) if packing.share_prompts else (0, length)
    members: list[list[Ids]] = []
    left = 0
    for response in given.responses:
        size = prompt_each + len(response)
        if not members or size > left:
            members.append([])
            left = packing.tokens_per_row - prompt_once
        members[-1].append(response)
        left -= size
    parts = []
    for number, group in enumerate(members if len(members) > 1 else []):
        part = GivenGroup(given.prompt, group, None)
        row = packed_row([0], [part], share_prompts=packing.share_prompts, label_prompts=False)
        parts.append(
            Part(row.input_ids, row.position_ids, row.segments, prompt_once if number else 0)
        )
    return tuple(parts)


def group_sizes(
    prompts: Sequence[Ids], responses: Sequence[Sequence[Ids]], packing: Packing
) -> list[int]:
    """Tokens that each group takes in a row."""
    lengths = (
        (len(prompt), list(map(len, group)))
        for prompt, group in zip(prompts, responses, strict=True)
    )
    return [
        group_tokens(*lengths_of_group, share_prompts=packing.share_prompts)
        for lengths_of_group in lengths
    ]


def group_tokens(
    prompt_length: int, response_lengths: Sequence[int], *, share_prompts: bool
) -> int:
    """Tokens that a group takes in a row."""
    return prompt_length * (1 if share_prompts else len(response_lengths)) + sum(response_lengths)


def efficiency(rows: Sequence[PackedRow], tokens_per_row: int) -> float:
    """Share of the rows' room that holds tokens. The rest is left empty; no padding is computed."""
    return sum(row.tokens for row in rows) / sum(max(row.tokens, tokens_per_row) for row in rows)
