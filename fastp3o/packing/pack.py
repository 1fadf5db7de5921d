"""Chooses the examples of each step, shares them among the processes, and distributes groups over packed rows.

Choices depend on seed, step and sizes only, so a resumed run makes the same.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.packing.packed_row import Ids, PackedRow, Part, RowBuilder, Spans, to_device
from fastp3o.packing.settings import Packing
from fastp3o.processes import Share
from fastp3o_kernels import sequence_logprobs


def pack(
    prompts: Sequence[Ids],
    responses: Sequence[Sequence[Ids]],
    packing: Packing,
    *,
    label_prompts: bool = False,
    groups: Sequence[int] | None = None,
    labelled: Sequence[Sequence[Spans] | None] | None = None,
) -> list[PackedRow]:
    """Packs groups into as few rows of `packing.tokens_per_row` tokens as first-fit decreasing finds.

    Groups stay whole: one that is longer gets a longer row of its own, which has `parts`. The responses' tokens are
    labelled, end-of-sequence included; with `label_prompts` (one response each) the prompt's too, except the first,
    which nothing predicts. groups: their numbers, by default 0, 1, ... labelled: the parts of responses that are,
    [P][K]; by default all.

    Raises ValueError for an empty prompt or response, naming its group.
    """
    for number, (prompt, group) in enumerate(zip(prompts, responses, strict=True)):
        if not prompt or not group or not all(group):
            tokens = f"{len(prompt)} prompt tokens and responses of {list(map(len, group))}"
            raise UserError(f"group {number} has {tokens}; each needs one")
        if label_prompts and len(group) != 1:
            raise UserError(f"group {number} has {len(group)} responses; a labelled prompt has one")
    numbers = range(len(prompts)) if groups is None else groups
    rows = []
    for members in first_fit_decreasing(group_sizes(prompts, responses, packing), packing.tokens_per_row):
        row = RowBuilder(share_prompts=packing.share_prompts, label_prompts=label_prompts)
        for member in members:
            spans = None if labelled is None else labelled[member]
            row.add_group(numbers[member], prompts[member], responses[member], spans)
        parts = parts_of(prompts[members[0]], responses[members[0]], packing)
        built = row.build()
        rows.append(replace(built, parts=parts, passes=len(parts)) if len(parts) > 1 else built)
    return rows


def parts_of(prompt: Ids, responses: Sequence[Ids], packing: Packing) -> tuple[Part, ...]:
    """A group in as few parts of `packing.tokens_per_row` tokens, or of one response, as its order allows."""
    prompt_once, prompt_each = (len(prompt), 0) if packing.share_prompts else (0, len(prompt))
    members: list[list[Ids]] = []
    left = 0
    for response in responses:
        size = prompt_each + len(response)
        if not members or size > left:
            members.append([])
            left = packing.tokens_per_row - prompt_once
        members[-1].append(response)
        left -= size
    parts = []
    for number, group in enumerate(members if len(members) > 1 else []):
        row = RowBuilder(share_prompts=packing.share_prompts, label_prompts=False)
        row.add_group(0, prompt, group, None)
        built = row.build()
        parts.append(Part(built.input_ids, built.position_ids, built.segments, prompt_once if number else 0))
    return tuple(parts)


def by_group(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> Tensor:
    """Values of the rows' responses, [S] each -> [P, K], in the order in which the groups were given to `pack`. Raises
    ValueError if groups differ in their number of responses.
    """
    responses_per_prompt = rows[0].responses_per_prompt
    if responses_per_prompt is None or any(row.responses_per_prompt != responses_per_prompt for row in rows):
        raise UserError("groups with different numbers of responses have no common shape [P, K]")
    order = torch.tensor([group for row in rows for group in row.groups])
    return torch.cat(list(values)).view(-1, responses_per_prompt)[to_device(order.argsort(), values[0].device)]


def sums_by_group(rows: Sequence[PackedRow], values: Sequence[Tensor]) -> Tensor:
    """`by_group` of sums over the tokens of each response. values: of the rows' labelled tokens, [N] each."""
    return by_group(rows, [sequence_logprobs(one, row.cu_seqlens) for row, one in zip(rows, values, strict=True)])


def group_sizes(prompts: Sequence[Ids], responses: Sequence[Sequence[Ids]], packing: Packing) -> list[int]:
    """Tokens that each group takes in a row."""
    lengths = ((len(prompt), list(map(len, group))) for prompt, group in zip(prompts, responses, strict=True))
    return [group_tokens(*lengths_of_group, share_prompts=packing.share_prompts) for lengths_of_group in lengths]


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
    """Splits indices into `parts` lists of equal length, with sums of sizes as even as a greedy choice makes them.
    Raises ValueError if the indices do not divide evenly.
    """
    if len(sizes) % parts:
        raise UserError(f"{len(sizes)} groups cannot be split evenly into {parts} parts")
    members: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        open_parts = (p for p in range(parts) if len(members[p]) < len(sizes) // parts)
        lightest = min(open_parts, key=lambda p: sums[p])
        members[lightest].append(index)
        sums[lightest] += sizes[index]
    return [sorted(part) for part in members]


def efficiency(rows: Sequence[PackedRow], tokens_per_row: int) -> float:
    """Share of the rows' room that holds tokens. The rest is left empty; no padding is computed."""
    return sum(row.tokens for row in rows) / sum(max(row.tokens, tokens_per_row) for row in rows)


Examples = dict[str, list]  # columns of a data set


def derived_seed(*parts: int) -> int:
    """A well-mixed 63-bit seed from a few small integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def examples_of_step(step: int, *, batch_size: int, total: int, seed: int) -> list[int]:
    """The `batch_size` examples of step `step` in an endless sequence of shuffled passes over `total` examples. A batch
    may hold the end of one pass and the beginning of the next: no example is left out, no batch is smaller.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    passes = range(first // total, (last - 1) // total + 1)
    examples = torch.cat([shuffled(total, derived_seed(seed, number)) for number in passes])
    start = first - passes.start * total
    return examples[start : start + batch_size].tolist()


def shuffled(total: int, seed: int) -> torch.Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def process_share(examples: list[int], accelerator: Accelerator) -> list[int]:
    """The examples of this process: each process takes every n-th."""
    return examples[accelerator.process_index :: accelerator.num_processes]


def deal(steps: Sequence[Sequence[int]], processes: int) -> list[list[list[int]]]:
    """Deals out the work of some steps, given its sizes in tokens. Returns indices into them for each step and process.
    In every step each process gets about as many tokens. Too little work for all goes to those with the least before.
    """
    dealt = []
    before = [0] * processes
    for sizes in steps:
        parts: list[list[int]] = [[] for _ in range(processes)]
        tokens = [0] * processes
        for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
            lightest = min(range(processes), key=lambda p: (tokens[p], before[p]))
            parts[lightest].append(index)
            tokens[lightest] += sizes[index]
        before = [sum(pair) for pair in zip(before, tokens, strict=True)]
        dealt.append([sorted(part) for part in parts])
    return dealt


def own_part(share: Share, examples: Examples) -> Examples:
    """The share's examples of a batch: about as many tokens as each other one gets."""
    texts = [column for name, column in examples.items() if name.endswith("_ids")]
    # A column has one text for each example, or a list of them.
    lengths = ([sum(map(len, ids)) if isinstance(ids[0], list) else len(ids) for ids in column] for column in texts)
    (parts,) = deal([list(map(sum, zip(*lengths, strict=True)))], share.count)
    part = parts[share.index]
    return {name: [column[example] for example in part] for name, column in examples.items()}
