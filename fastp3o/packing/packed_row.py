"""A packed row: several groups one after the other, and what attention and losses need to keep them apart.

T tokens of a row, S responses in it, N labelled tokens, G segments, U gathered keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class OnDevice:
    """A dataclass whose tensors move together."""

    def to(self, device: torch.device) -> Any:
        return type(self)(**{field.name: to_device(getattr(self, field.name), device) for field in fields(self)})


def to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor | OnDevice):
        return value.to(device)
    if isinstance(value, dict):
        return {name: to_device(part, device) for name, part in value.items()}
    return tuple(to_device(part, device) for part in value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class SharedKeys(OnDevice):
    """Where keys come from when several segments see the same prompt."""

    tokens: Tensor  # [U] int64, the token of the row that each key belongs to
    own: Tensor  # [T] int64, the key of each token in its own segment
    # For each further response of a group: tokens of the row that its segment sees too, and their keys there. No token
    # comes twice in one of them, so adding up their gradients is deterministic.
    repeats: tuple[tuple[Tensor, Tensor], ...]


@dataclass(frozen=True)
class Segments(OnDevice):
    """Segment g's queries are tokens cu_queries[g] to cu_queries[g + 1], its keys cu_keys[g] to cu_keys[g + 1].

    Queries see the keys up to their own position, aligned at the end: the last query sees every key of its segment.
    """

    cu_queries: Tensor  # [G + 1] int32
    cu_keys: Tensor  # [G + 1] int32
    query_lengths: tuple[int, ...]  # the same on the host
    key_lengths: tuple[int, ...]
    shared: SharedKeys | None  # None if keys are those of the tokens, in their order


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

    @property
    def tokens(self) -> int:
        return self.input_ids.shape[1]

    @property
    def cu_seqlens_on_host(self) -> Tensor:
        """The same offsets, always on the CPU: losses cut their chunks without waiting for a device."""
        return offsets(self.labelled_lengths)


def offsets(lengths: Sequence[int]) -> Tensor:
    """[0, l₁, l₁ + l₂, ...], int32."""
    return torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
