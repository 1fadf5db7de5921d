"""A packed row: several groups one after the other, and what attention and losses need to keep them
apart.

With shared prompts a group lies in it as

    [x, y1, y2]         queries x+y1 see the keys x+y1, queries y2 the keys x+y2

and without as [x, y1], [x, y2]. An index gathers the keys of a row, so that each segment of queries
has its keys in one piece. Positions of every response begin at len(x), and the last token of x
predicts its first token.

T tokens of a row, S responses in it, N labeled tokens, G segments, U gathered keys.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_unflatten

from fastp3o.errors import UserError

# Bytes; kernels load whole vectors from addresses that are a multiple of it.
ALIGNMENT = 128


class OnDevice:
    """A dataclass whose tensors move together."""

    def __init_subclass__(cls) -> None:
        def values(row: Any) -> tuple[list[Any], list[str]]:
            names = [field.name for field in fields(row) if field.init]
            return [getattr(row, name) for name in names], names

        register_pytree_node(
            cls, values, lambda values, names: cls(**dict(zip(names, values, strict=True)))
        )

    def to(self, device: torch.device) -> Any:
        return to_device(self, device)


def to_device(value: Any, device: torch.device) -> Any:
    """The value with all tensors in it on the device: a tensor, an OnDevice, or tuples, lists and
    dicts of them. The host does not wait for tensors that go from its memory to a GPU.
    """
    leaves, structure = tree_flatten(value)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    moved = iter(
        upload(tensors, device)
        if device.type == "cuda"
        else [tensor.to(device) for tensor in tensors]
    )
    return tree_unflatten(
        [next(moved) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
    )


def upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on the device. Those that the host has are views of one copy there."""
    on_host = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    begins = [0, *accumulate(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in on_host)]
    staged = torch.empty(begins[-1], dtype=torch.uint8, pin_memory=True)
    for tensor, begin in zip(on_host, begins, strict=False):
        view_like(tensor, staged, begin).copy_(tensor)
    arrived = staged.to(device, non_blocking=True)
    views = iter(
        [view_like(tensor, arrived, begin) for tensor, begin in zip(on_host, begins, strict=False)]
    )
    return [next(views) if tensor.device.type == "cpu" else tensor.to(device) for tensor in tensors]


def view_like(tensor: Tensor, memory: Tensor, begin: int) -> Tensor:
    return memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)


Ids = list[int]
Array = np.ndarray  # int64
Spans = Sequence[tuple[int, int]]  # parts of a response, each from a token to before another


@dataclass(frozen=True)
class SharedKeys(OnDevice):
    """The index that gathers keys when several segments see the same prompt."""

    tokens: Tensor  # [U] int64, the token of the row that each key belongs to
    own: Tensor  # [T] int64, the key of each token in its own segment
    # For each further response of a group: tokens of the row that its segment sees too, and their
    # keys there. No token comes twice in one of them, so adding up their gradients is
    # deterministic.
    repeats: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Segments(OnDevice):
    """Segment g's queries are tokens cu_queries[g] to cu_queries[g + 1], its keys cu_keys[g] to
    cu_keys[g + 1]. Queries see the keys up to their own position, aligned at the end: the last
    query sees every key of its segment.
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
        """[T] and [U]: where queries and keys are in [G, longest_keys]. A query is where its own
        key is.
        """
        ends = (
            torch.arange(len(self.key_lengths), device=self.cu_keys.device) * self.longest_keys
            + self.cu_keys.diff()
        )

        def places(offsets: Tensor, total: int) -> Tensor:
            shifts = (ends - offsets[1:]).repeat_interleave(offsets.diff(), output_size=total)
            return shifts + torch.arange(total, device=offsets.device)

        return places(self.cu_queries, sum(self.query_lengths)), places(
            self.cu_keys, sum(self.key_lengths)
        )


@dataclass(frozen=True)
class GivenGroup:
    """A group as `pack` was given it; no tuple, in which `to_device` would look at every number."""

    prompt: Ids
    responses: Sequence[Ids]
    labeled: Sequence[Spans] | None  # parts of the responses; None: all


@dataclass(frozen=True)
class Part(OnDevice):
    """Some responses of a group that does not fit a row, after their prompt: what a model's layers
    take at once.
    """

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
    labeled_at: Tensor  # [N] int64, tokens of the row whose hidden states predict the labels
    labels: Tensor  # [N] int64, the labeled tokens
    cu_seqlens: Tensor  # [S + 1] int32, where each response's labels begin in [N]
    labeled_lengths: tuple[int, ...]  # their lengths on the host
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
        return offsets(self.labeled_lengths)


def offsets(lengths: Sequence[int]) -> Tensor:
    """[0, l₁, l₁ + l₂, ...], int32."""
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)


# --- one row from its groups ----------------------------------------------------------------------


def packed_row(
    numbers: Sequence[int], given: Sequence[GivenGroup], *, share_prompts: bool, label_prompts: bool
) -> PackedRow:
    """The groups one after the other. numbers: of the groups.

    Python looks at responses, and arrays at their tokens: the host does not keep a GPU waiting.
    """
    sizes = [len(group.responses) for group in given]
    # [S] each: the place of every response in its group, its own tokens, and its prompt's.
    place = ranges(np.zeros(len(sizes), dtype=np.int64), np.array(sizes))
    own = np.array([len(response) for group in given for response in group.responses])
    prompt = np.repeat([len(group.prompt) for group in given], sizes)
    # A segment is a response and, unless an earlier one has brought it, its prompt: that is where
    # it was, and predicts this response, too.
    again = (place > 0) & share_prompts
    brought = np.where(again, 0, prompt)
    lengths = brought + own
    begins = starts(lengths)
    prompt_begins = np.repeat(begins[place == 0], sizes) if share_prompts else begins
    ids = joined(row_pieces(given, share_prompts=share_prompts))
    positions = ranges(prompt - brought, lengths)

    # Labels begin behind the prompt, or at its second token, which is the first that something
    # predicts.
    first = begins + np.minimum(brought, 1 if label_prompts else brought)
    labeled_lengths, labels_at = labeled_tokens(given, first, begins + lengths - first)
    predicting = labels_at - 1
    follows = np.repeat(again, labeled_lengths) & (labels_at == np.repeat(first, labeled_lengths))
    predicting[follows] = np.repeat(prompt_begins + prompt - 1, labeled_lengths)[follows]

    key_lengths = (prompt - brought) + lengths
    shared = (
        shared_keys(place, prompt_begins, prompt, lengths, key_lengths) if again.any() else None
    )
    return PackedRow(
        input_ids=ids[None],
        position_ids=torch.from_numpy(positions)[None],
        segments=Segments(
            cu_queries=offsets(lengths.tolist()),
            cu_keys=offsets(key_lengths.tolist()),
            query_lengths=tuple(lengths.tolist()),
            key_lengths=tuple(key_lengths.tolist()),
            shared=shared,
        ),
        labeled_at=torch.from_numpy(predicting),
        labels=ids[torch.from_numpy(labels_at)],
        cu_seqlens=offsets(labeled_lengths.tolist()),
        labeled_lengths=tuple(labeled_lengths.tolist()),
        ends_at=torch.from_numpy(begins + lengths - 1),
        groups=tuple(numbers),
        responses_per_prompt=sizes[0] if len(set(sizes)) == 1 else None,
        given=tuple(given),
    )


def row_pieces(given: Sequence[GivenGroup], *, share_prompts: bool) -> Iterator[Ids]:
    """Prompts and responses, in the order of the row."""
    for group in given:
        for k, response in enumerate(group.responses):
            if k == 0 or not share_prompts:
                yield group.prompt
            yield response


def joined(pieces: Iterable[Ids]) -> Tensor:
    """[T] int64, one after the other. Raises TypeError for an id that is no integer."""
    ids: Ids = []
    for piece in pieces:
        ids += piece
    return torch.frombuffer(array("q", ids), dtype=torch.int64)


def labeled_tokens(given: Sequence[GivenGroup], first: Array, most: Array) -> tuple[Array, Array]:
    """How many tokens of each response are labeled, [S], and all of them in the row, [N]. first,
    most: [S], the first token of each that may be, and how many may be.
    """
    if all(group.labeled is None for group in given):
        return most, ranges(first, most)
    # The labeled parts of each response; None for one that is labeled as a whole.
    by_response: list[Sequence[tuple[int, int]] | None] = []
    for group in given:
        by_response += group.labeled or [None] * len(group.responses)
    spans: list[tuple[int, int, int]] = []  # a response's number, where a part begins and ends
    for number, (parts, tokens) in enumerate(zip(by_response, most.tolist(), strict=True)):
        if parts is None:
            parts = [(0, tokens)]
        spans += [(number, begin, end) for begin, end in parts]
    response, begin, end = np.array(spans, dtype=np.int64).reshape(-1, 3).T
    if (end > most[response]).any():
        raise UserError("labeled parts of a response reach beyond its last token")
    lengths = np.zeros(len(first), dtype=np.int64)
    np.add.at(lengths, response, end - begin)
    return lengths, ranges(first[response] + begin, end - begin)


def shared_keys(
    place: Array, prompt_begins: Array, prompt: Array, lengths: Array, key_lengths: Array
) -> SharedKeys:
    """[S] each: a response's place in its group, its prompt's begin and length, its tokens and its
    keys.
    """
    # A response's own keys come after its prompt's.
    key_begins = starts(key_lengths)
    own = ranges(key_begins + key_lengths - lengths, lengths)
    # The others read their prompt's tokens once more: first all second responses, then all third.
    further = np.flatnonzero(place)
    further = further[np.argsort(place[further], kind="stable")]
    tokens = ranges(prompt_begins[further], prompt[further])
    keys = ranges(key_begins[further], prompt[further])
    # The token of each key.
    gathered = np.empty(key_lengths.sum(), dtype=np.int64)
    gathered[own] = np.arange(len(own))
    gathered[keys] = tokens
    # The keys that are read once more, by the place of their response in its group.
    counts = np.bincount(place[further], weights=prompt[further]).astype(np.int64)[1:].tolist()
    tokens_by_place = torch.from_numpy(tokens).split(counts)
    keys_by_place = torch.from_numpy(keys).split(counts)
    repeats = tuple(zip(tokens_by_place, keys_by_place, strict=True))
    return SharedKeys(torch.from_numpy(gathered), torch.from_numpy(own), repeats)


def starts(lengths: Array) -> Array:
    """[0, l₁, l₁ + l₂, ...] without the last sum."""
    return np.cumsum(lengths) - lengths


def ranges(begins: Array, lengths: Array) -> Array:
    """[b₁, b₁ + 1, ..., b₁ + l₁ − 1, b₂, ...], int64."""
    return np.arange(lengths.sum()) + np.repeat(begins - starts(lengths), lengths)
