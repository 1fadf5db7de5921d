"""A packed row: several groups one after the other, and what attention and losses need to keep them apart.

With shared prompts a group lies in it as

    [x, y1, y2]         queries x+y1 see the keys x+y1, queries y2 the keys x+y2

and without as [x, y1], [x, y2]. An index gathers the keys of a row, so that each segment of queries has its keys in one
piece. Positions of every response begin at len(x), and the last token of x predicts its first token.

T tokens of a row, S responses in it, N labelled tokens, G segments, U gathered keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

# Bytes; kernels load whole vectors from addresses that are a multiple of it.
ALIGNMENT = 128


class OnDevice:
    """A dataclass whose tensors move together."""

    def __init_subclass__(cls) -> None:
        def values(row: Any) -> tuple[list[Any], list[str]]:
            names = [field.name for field in fields(row) if field.init]
            return [getattr(row, name) for name in names], names

        register_pytree_node(cls, values, lambda values, names: cls(**dict(zip(names, values, strict=True))))

    def to(self, device: torch.device) -> Any:
        return to_device(self, device)


def to_device(value: Any, device: torch.device) -> Any:
    """The value with all tensors in it on the device: a tensor, an OnDevice, or tuples, lists and dicts of them. The
    host does not wait for tensors that go from its memory to a GPU.
    """
    leaves, structure = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    moved = iter(upload(tensors, device) if device.type == "cuda" else [tensor.to(device) for tensor in tensors])
    return tree_unflatten([next(moved) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure)


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on the device. Those that the host has are views of one copy there."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    begins = [0, *accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in on_host)]
    staged = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, begin in zip(on_host, begins, strict=False):
        view_like(tensor, staged, begin).copy_(tensor)
    arrived = staged.to(device, non_blocking=True)
    views = iter([view_like(tensor, arrived, begin) for tensor, begin in zip(on_host, begins, strict=False)])
    return [next(views) if tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors]


def view_like(tensor: Tensor, memory: Tensor, begin: int) -> Tensor:
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


Ids = list[int]
Spans = Sequence[tuple[int, int]]  # parts of a response, each from a token to before another


@dataclass(frozen=True)
class SharedKeys(OnDevice):
    """The index that gathers keys when several segments see the same prompt."""

    tokens: Tensor  # [U] int64, the token of the row that each key belongs to
    own: Tensor  # [T] int64, the key of each token in its own segment
    # For each further response of a group: tokens of the row that its segment sees too, and their keys there. No token
    # comes twice in one of them, so adding up their gradients is deterministic.
    repeats: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Segments(OnDevice):
    """Segment g's queries are tokens cu_queries[g] to cu_queries[g + 1], its keys cu_keys[g] to cu_keys[g + 1]. Queries
    see the keys up to their own position, aligned at the end: the last query sees every key of its segment.
    """

    cu_queries: Tensor  # [G + 1] int32
    cu_keys: Tensor  # [G + 1] int32
    query_lengths: tuple[int, ...]  # the same on the host
    key_lengths: tuple[int, ...]
    shared: SharedKeys | None  # None if keys are those of the tokens, in their order
    # Numbers and no properties: a compiler would look at all lengths.
    longest_query: int = field(init=False)
    longest_keys: int = field(init=False)

    def __post_init__(self) -> None:
        vars(self).update(longest_query=max(self.query_lengths), longest_keys=max(self.key_lengths))

    @cached_property
    def padded_places(self) -> tuple[Tensor, Tensor]:
        """[T] and [U]: where queries and keys are in [G, longest_keys]. A query is where its own key is."""
        ends = torch.arange(len(self.key_lengths), device=self.cu_keys.device) * self.longest_keys + self.cu_keys.diff()

        def places(offsets: Tensor, total: int) -> Tensor:
            shifts = (ends - offsets[1:]).repeat_interleave(offsets.diff(), output_size=total)
            return shifts + torch.arange(total, device=offsets.device)

        return places(self.cu_queries, sum(self.query_lengths)), places(self.cu_keys, sum(self.key_lengths))


@dataclass(frozen=True)
class GivenGroup:
    """A group as `pack` was given it; no tuple, in which `to_device` would look at every number."""

    prompt: Ids
    responses: Sequence[Ids]
    labelled: Sequence[Spans] | None  # parts of the responses; None: all


@dataclass(frozen=True)
class Part(OnDevice):
    """Some responses of a group that does not fit a row, after their prompt: what a model's layers take at once."""

    input_ids: Tensor  # [1, t] int64
    position_ids: Tensor  # [1, t] int64
    segments: Segments
    again: int  # tokens at its beginning that an earlier part has, too


@dataclass(frozen=True)
class PackedRow(OnDevice):
    """One row as a model takes it, and which of its tokens predict which labels."""

    input_ids: Tensor  # [1, T] int64
    position_ids: Tensor  # [1, T] int64
    segments: Segments
    labelled_at: Tensor  # [N] int64, tokens of the row whose hidden states predict the labels
    labels: Tensor  # [N] int64, the labelled tokens
    cu_seqlens: Tensor  # [S + 1] int32, where each response's labels begin in [N]
    labelled_lengths: tuple[int, ...]  # their lengths on the host
    ends_at: Tensor  # [S] int64, each response's last token in the row
    groups: tuple[int, ...]  # the number of each group, in the order of the row
    responses_per_prompt: int | None  # None if groups differ in it
    given: tuple[GivenGroup, ...]  # the groups themselves
    # Of a group that is too long; together they have all T tokens, in order.
    parts: tuple[Part, ...] = field(default=(), kw_only=True)
    # Through the layers: one for each part, and as many as other processes make meanwhile.
    passes: int = field(default=1, kw_only=True)

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def cu_seqlens_on_host(self) -> Tensor:
        """`cu_seqlens`, always on the CPU: losses cut their chunks without waiting for a device."""
        return offsets(self.labelled_lengths)


def offsets(lengths: Sequence[int]) -> Tensor:
    """[0, l₁, l₁ + l₂, ...], int32."""
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


# --- one row from its groups -----------------------------------------------------------------------------------------


class RowBuilder:
    """A packed row that grows by one group at a time."""

    def __init__(self, *, share_prompts: bool, label_prompts: bool):
        self.share_prompts, self.label_prompts = share_prompts, label_prompts
        self.groups: list[int] = []
        self.given: list[GivenGroup] = []
        self.group_sizes: set[int] = set()
        self.input_ids: Ids = []
        self.positions: list[int] = []
        self.labelled_at: list[int] = []
        self.labels: Ids = []
        self.labelled_lengths: list[int] = []
        self.ends_at: list[int] = []
        self.query_lengths: list[int] = []
        self.key_lengths: list[int] = []
        self.keys: list[int] = []
        self.own_keys: list[int] = []
        self.repeats: list[tuple[list[int], list[int]]] = []

    def add_group(self, number: int, prompt: Ids, responses: Sequence[Ids], labelled: Sequence[Spans] | None) -> None:
        """labelled: the parts of each response that are; None for whole responses."""
        self.groups.append(number)
        self.given.append(GivenGroup(prompt, responses, labelled))
        self.group_sizes.add(len(responses))
        prompt_at = range(len(self.input_ids), len(self.input_ids) + len(prompt))
        for k, response in enumerate(responses):
            # Further responses see a shared prompt where it is, before the first one, and are predicted from there.
            again = self.share_prompts and k > 0
            start = len(self.input_ids)
            ids = response if again else [*prompt, *response]
            first = 0 if again else 1 if self.label_prompts else len(prompt)
            before_first = prompt_at[-1] if again else start + first - 1
            spans = [(0, len(ids) - first)] if labelled is None else labelled[k]
            places = [place for span in spans for place in range(*span)]
            self.labelled_at += [start + first + place - 1 if place else before_first for place in places]
            self.labels += [ids[first + place] for place in places]
            self.labelled_lengths.append(len(places))
            position = len(prompt) if again else 0
            self.positions += range(position, position + len(ids))
            self.input_ids += ids
            self.ends_at.append(len(self.input_ids) - 1)
            self.query_lengths.append(len(ids))
            self.key_lengths.append(position + len(ids))
            if again:
                self.repeats += [([], []) for _ in range(k - len(self.repeats))]
                tokens, keys = self.repeats[k - 1]
                tokens += prompt_at
                keys += range(len(self.keys), len(self.keys) + len(prompt))
                self.keys += prompt_at
            self.own_keys += range(len(self.keys), len(self.keys) + len(ids))
            self.keys += range(start, start + len(ids))

    def build(self) -> PackedRow:
        repeats = tuple((torch.tensor(tokens), torch.tensor(keys)) for tokens, keys in self.repeats)
        return PackedRow(
            input_ids=torch.tensor([self.input_ids]),
            position_ids=torch.tensor([self.positions]),
            segments=Segments(
                cu_queries=offsets(self.query_lengths),
                cu_keys=offsets(self.key_lengths),
                query_lengths=tuple(self.query_lengths),
                key_lengths=tuple(self.key_lengths),
                shared=SharedKeys(torch.tensor(self.keys), torch.tensor(self.own_keys), repeats) if repeats else None,
            ),
            labelled_at=torch.tensor(self.labelled_at),
            labels=torch.tensor(self.labels),
            cu_seqlens=offsets(self.labelled_lengths),
            labelled_lengths=tuple(self.labelled_lengths),
            ends_at=torch.tensor(self.ends_at),
            groups=tuple(self.groups),
            responses_per_prompt=next(iter(self.group_sizes)) if len(self.group_sizes) == 1 else None,
            given=tuple(self.given),
        )
