"""Prefill: prompts without their last tokens go through the policy once, for keys and values of all their responses."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.on_device import to_device
from fastp3o.packing.pack import first_fit_decreasing
from fastp3o.packing.packed_row import Ids, Segments, offsets
from fastp3o.rollouts.cache import Cache, LayerShape

# Length of a packed row of prompts: enough for large matrix products.
TOKENS_PER_ROW = 2048


class PromptRow(NamedTuple):
    """A packed row of T tokens. The first n belong to prompts, the others are padding."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    segments: Segments
    prompt_of_token: Tensor  # [n]
    position_of_token: Tensor  # [n]


def prefill(
    policy: PackedModel, cache: Cache, prompts: Sequence[Ids], *, pad: bool, tokens_per_row: int = TOKENS_PER_ROW
) -> None:
    """Puts keys and values of the prompts into the cache.

    pad: makes rows of equal length, since libraries on a GPU round differently at other shapes.
    """
    for row in prompt_rows(prompts, tokens_per_row, pad, policy.model.device):
        cache.prompt_of_token, cache.position_of_token = row.prompt_of_token, row.position_of_token
        policy.hidden_states(row.input_ids, row.position_ids, segments=row.segments, cache=cache)


def prompt_rows(prompts: Sequence[Ids], tokens_per_row: int, pad: bool, device: torch.device) -> Iterator[PromptRow]:
    cached = {p: ids[:-1] for p, ids in enumerate(prompts) if len(ids) > 1}
    numbers = list(cached)
    for members in first_fit_decreasing([len(ids) for ids in cached.values()], tokens_per_row):
        members = [numbers[m] for m in members]
        lengths = [len(cached[p]) for p in members]
        positions = torch.cat([torch.arange(length) for length in lengths])
        padding = -sum(lengths) % tokens_per_row if pad else 0
        # Padding is a segment of its own, all at position 0, which every model has.
        lengths += [padding] if padding else []
        input_ids = torch.tensor([token for p in members for token in cached[p]] + [0] * padding)
        prompt_of_token = torch.tensor(members).repeat_interleave(torch.tensor(lengths[: len(members)]))
        position_ids = torch.nn.functional.pad(positions, (0, padding))
        parts = input_ids[None], position_ids[None], offsets(lengths), prompt_of_token
        input_ids, position_ids, bounds, prompt_of_token = to_device(parts, device)
        segments = Segments(bounds, bounds, tuple(lengths), tuple(lengths), None)
        yield PromptRow(input_ids, position_ids, segments, prompt_of_token, position_ids[0, : len(positions)])


class LayerShapes:
    """A KeyValueCache that only notes the shapes of what it is given."""

    def __init__(self) -> None:
        self.found: dict[int, LayerShape] = {}

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise UserError(f"keys {list(key.shape)} and values {list(value.shape)} of layer {layer} differ in shape")
        self.found[layer] = LayerShape(value.shape[1], value.shape[2], value.dtype)

    def attend(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError("there are no responses to continue")


def layer_shapes(policy: PackedModel, token: int) -> dict[int, LayerShape]:
    """Shapes of the policy's keys by layer index. token: any token of the vocabulary.

    Raises UserError if heads of values have another size than those of keys.
    """
    shapes = LayerShapes()
    (row,) = prompt_rows([[token, token]], 1, False, policy.model.device)
    policy.hidden_states(row.input_ids, row.position_ids, segments=row.segments, cache=shapes)
    return shapes.found
