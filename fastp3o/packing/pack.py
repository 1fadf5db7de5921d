"""Chooses the examples of each step, shares them among the processes, and distributes groups over packed rows.

Choices depend on seed, step and sizes only, so a resumed run makes the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from heapq import heappop, heappush, heapreplace
from math import inf

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.packing.packed_row import GivenGroup, Ids, PackedRow, Part, Spans, packed_row, to_device
from fastp3o.packing.settings import Packing
from fastp3o.processes import Share
from fastp3o_kernels import sequence_logprobs

# --- groups to rows ---------------------------------------------------------------------------------------------------


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
        row_groups = [GivenGroup(prompts[m], responses[m], None if labelled is None else labelled[m]) for m in members]
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
    """A group in as few parts of `packing.tokens_per_row` tokens, or of one response, as its order allows."""
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
        parts.append(Part(row.input_ids, row.position_ids, row.segments, prompt_once if number else 0))
    return tuple(parts)


# --- tables [P, K] ----------------------------------------------------------------------------------------------------


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
    return by_group(
        rows, [sequence_logprobs(logprobs, row.cu_seqlens) for row, logprobs in zip(rows, values, strict=True)]
    )


def group_sizes(prompts: Sequence[Ids], responses: Sequence[Sequence[Ids]], packing: Packing) -> list[int]:
    """Tokens that each group takes in a row."""
    lengths = ((len(prompt), list(map(len, group))) for prompt, group in zip(prompts, responses, strict=True))
    return [group_tokens(*lengths_of_group, share_prompts=packing.share_prompts) for lengths_of_group in lengths]


def group_tokens(prompt_length: int, response_lengths: Sequence[int], *, share_prompts: bool) -> int:
    """Tokens that a group takes in a row."""
    return prompt_length * (1 if share_prompts else len(response_lengths)) + sum(response_lengths)


# --- which row gets which group ---------------------------------------------------------------------------------------


def first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Bins of indices; the largest first, each into the first bin with room. Ties keep their order."""
    bins: list[list[int]] = [[] for _ in sizes]
    # A tree: node n is above 2 n and 2 n + 1 and holds the larger room of the two, down to the bins, in their order. A
    # bin that is still empty takes anything.
    leaves = 1 << (len(sizes) - 1).bit_length()
    room: list[float] = [inf] * (2 * leaves)
    for index in largest_first(sizes):
        size, node = sizes[index], 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= size else 2 * node + 1
        members = bins[node - leaves]
        room[node] = (room[node] if members else capacity) - size
        members.append(index)
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [members for members in bins if members]


def balanced(sizes: Sequence[int], parts: int) -> list[list[int]]:
    """Splits indices into `parts` lists of equal length, with sums of sizes as even as a greedy choice makes them.
    Raises ValueError if the indices do not divide evenly.
    """
    if len(sizes) % parts:
        raise UserError(f"{len(sizes)} groups cannot be split evenly into {parts} parts")
    members: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, part) for part in range(parts)]  # a heap of those that are not full
    for index in largest_first(sizes):
        total, part = heappop(lightest)
        members[part].append(index)
        if len(members[part]) < len(sizes) // parts:
            heappush(lightest, (total + sizes[index], part))
    return [sorted(part) for part in members]


def largest_first(sizes: Sequence[int]) -> list[int]:
    """Indices by falling size. Ties keep their order."""
    return sorted(range(len(sizes)), key=lambda index: -sizes[index])


def efficiency(rows: Sequence[PackedRow], tokens_per_row: int) -> float:
    """Share of the rows' room that holds tokens. The rest is left empty; no padding is computed."""
    return sum(row.tokens for row in rows) / sum(max(row.tokens, tokens_per_row) for row in rows)


Examples = dict[str, list]  # columns of a data set


# --- seeds and orders -------------------------------------------------------------------------------------------------


def derived_seed(*parts: int) -> int:
    """A well-mixed 63-bit seed from a few small integers."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> 1)


def examples_of_step(step: int, *, batch_size: int, total: int, seed: int) -> list[int]:
    """The `batch_size` examples of step `step` in an endless sequence of shuffled passes over `total` examples. A batch
    may hold the end of one pass and the beginning of the next: no example is left out, no batch is smaller.
    """
    first, last = step * batch_size, (step + 1) * batch_size
    examples: list[int] = []
    for number in range(first // total, (last - 1) // total + 1):
        start = number * total
        order = order_of_pass(total, derived_seed(seed, number))
        examples += order[max(first - start, 0) : last - start].tolist()
    return examples


# Two passes of the prompts, since rollouts may be rounds ahead of the update, and two of further texts.
@lru_cache(maxsize=4)
def order_of_pass(total: int, seed: int) -> Tensor:
    """`shuffled` examples. The order is kept, 8 bytes an example, until those of other passes have come; never change
    it.
    """
    return shuffled(total, seed)


def shuffled(total: int, seed: int) -> Tensor:
    """[total] int64: the numbers below `total` in random order."""
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


# --- shares of the processes ------------------------------------------------------------------------------------------


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
        lightest = sorted((0, before[process], process) for process in range(processes))  # a heap
        for index in largest_first(sizes):
            tokens, earlier, process = lightest[0]
            parts[process].append(index)
            heapreplace(lightest, (tokens + sizes[index], earlier, process))
        for tokens, _, process in lightest:
            before[process] += tokens
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
