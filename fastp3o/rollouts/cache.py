"""The cache: keys and values of all layers, the memory that they take, and attention to them."""

from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastp3o.runtime.host_memory import free_host_memory
from fastp3o_kernels.decoding import LayerCache, Slots, decode_attention

# The cache may take this share of free memory; the rest is for activations of a step and of
# prompts, and for logits.
SHARE = 0.7
# With more slots, weights are no longer most of what a step reads, and steps become longer.
MOST_SLOTS = 256


class LayerShape(NamedTuple):
    """Shape of one token's keys in one layer; values have the same."""

    heads: int
    head_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.heads * self.head_size * self.dtype.itemsize


class Room(NamedTuple):
    """Sizes of the cache and of all tensors of slots and responses."""

    prompts: int
    prompt_tokens: int
    responses_per_prompt: int
    slots: int
    response_tokens: int

    @property
    def responses(self) -> int:
        return self.prompts * self.responses_per_prompt

    @property
    def tokens(self) -> int:
        """Tokens in the cache."""
        return self.prompts * self.prompt_tokens + self.slots * self.response_tokens

    def holds(self, other: "Room") -> bool:
        """Whether an engine with this room can replace one with the other."""
        pairs = zip(self, other, strict=True)
        return self.responses_per_prompt == other.responses_per_prompt and all(
            mine >= its for mine, its in pairs
        )


def fitting_room(
    longest_prompt: int,
    response_tokens: int,
    responses_per_prompt: int,
    *,
    prompts: int,
    bytes_per_token: int,
    memory: int,
    prompt_copies: int = 1,
) -> Room:
    """Room for `prompts` at once with a slot for each of their responses, or for as many as
    `memory` (bytes) holds. Less memory means fewer prompts at once, then fewer slots; at least one
    of each. prompt_copies: of a prompt's keys.
    """
    prompt_tokens = max(1, longest_prompt)
    tokens = memory // bytes_per_token
    slots_per_prompt = min(responses_per_prompt, MOST_SLOTS)
    fits = tokens // (prompt_copies * prompt_tokens + slots_per_prompt * response_tokens)
    if fits:
        prompts = min(prompts, fits)
        slots = min(prompts * responses_per_prompt, MOST_SLOTS)
    else:
        prompts = 1
        slots = max(
            1, min(slots_per_prompt, (tokens - prompt_copies * prompt_tokens) // response_tokens)
        )
    return Room(prompts, prompt_tokens, responses_per_prompt, slots, response_tokens)


def available_memory(device: torch.device) -> int:
    """Bytes that the cache may take of the memory that is free now."""
    if device.type == "cuda":
        # What torch keeps after that is fragments beside tensors, and the cache is one piece.
        return_unused_memory(device)
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = free_host_memory()
    return int(SHARE * free)


def return_unused_memory(device: torch.device) -> None:
    """Returns whole blocks that torch keeps for later to the device. Without it, tensors that stay,
    such as an optimizer's moments, would be put into the block of a cache that was released, and
    the next would need another.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.empty_cache()


class Cache:
    """A KeyValueCache of prompts and of slots, whose memory can be given back. slots: the responses
    that the slots of the current step work on. prompt_of_token, position_of_token: [n] int64, the
    places of the keys of the next row of prompts; further tokens of the row are padding.
    """

    def __init__(self, shapes: dict[int, LayerShape], room: Room, device: torch.device):
        # One piece of memory, which is more likely to come back at the same address than many.
        self.room = room
        *_, self.last_layer = shapes  # that has keys of its own
        sizes = [self.tokens() * shape.bytes_per_token for shape in shapes.values()]
        self.memory = self.zeros(sum(sizes), device)
        self.cut(shapes, sizes)
        self.slots: Slots
        self.prompt_of_token: Tensor
        self.position_of_token: Tensor

    def tokens(self) -> int:
        """The number of tokens whose keys and values are kept."""
        return self.room.tokens

    def zeros(self, size: int, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device)

    def cut(self, shapes: dict[int, LayerShape], sizes: list[int]) -> None:
        """Gives each layer its part of the memory. sizes: of the parts, in bytes."""
        room = self.room
        self.layers: dict[int, LayerCache] = {}
        for (layer, shape), part in zip(shapes.items(), self.memory.split(sizes), strict=True):
            prompts = room.prompts, shape.heads, room.prompt_tokens, shape.head_size
            slots = room.slots, shape.heads, room.response_tokens, shape.head_size
            sides = prompts, prompts, slots, slots
            parts = part.view(shape.dtype).split(list(map(prod, sides)))
            self.layers[layer] = LayerCache(
                *(one.view(side) for one, side in zip(parts, sides, strict=True))
            )

    def tensors(self) -> list[Tensor]:
        return [self.memory]

    def keep_slots(self, responses: Tensor) -> None:
        """The numbers of the responses that slots work on from now on, [R] int64, where some slots
        are dropped.
        """

    def begin_step(self, slots: Slots, own_tokens: int) -> None:
        """slots: what the slots work on in this step. own_tokens: before it, the most of a slot."""
        self.slots = slots

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        cache = self.layers[layer]
        place = self.prompt_of_token, slice(None), self.position_of_token
        for stored, tensor in ((cache.prompt_keys, key), (cache.prompt_values, value)):
            stored[place] = tensor[: len(self.prompt_of_token)].to(stored.dtype)
        return key, value

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any
    ) -> Tensor:
        # Rotary embeddings may leave queries and keys in fp32 when values are not.
        query, key, value = (
            tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value)
        )
        return decode_attention(query, key, value, self.layers[layer], self.slots, **options)[None]

    def store_own(self, layer: int, slot: Tensor, step: Tensor, key: Tensor, value: Tensor) -> None:
        """Keeps keys and values [n, Hkv, D] of these slots' own tokens, [n] int64 both."""
        kv = self.layers[layer]
        for stored, tensor in ((kv.own_keys, key), (kv.own_values, value)):
            stored[slot, :, step] = tensor.to(stored.dtype)

    def cached(
        self, layer: int, prompt: int, prompt_tokens: int, slot: int, own_tokens: int
    ) -> list[list[Tensor]]:
        """[Hkv, n, D] each: keys of a prompt's first tokens and a slot's first own ones, then
        values.
        """
        kv = self.layers[layer]
        pairs = (kv.prompt_keys, kv.own_keys), (kv.prompt_values, kv.own_values)
        return [
            [shared[prompt, :, :prompt_tokens], own[slot, :, :own_tokens]] for shared, own in pairs
        ]

    def begin(self, prompt_lengths: list[int]) -> None:
        """Begins a batch of prompts with as many tokens to cache. Takes the memory again if it was
        given back.
        """
        storage = self.memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.memory.numel())
            self.memory.zero_()

    def release_memory(self) -> None:
        """Gives the memory back until it is taken again, perhaps at another address."""
        self.memory.untyped_storage().resize_(0)
