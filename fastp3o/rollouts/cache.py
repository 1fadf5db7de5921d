"""Keys and values of all layers, and attention of tokens that each continue a response."""

from math import prod

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.rollouts.room import LayerShape, Room
from fastp3o_kernels.decoding import LayerCache, Slots, decode_attention


class Cache:
    """A KeyValueCache of prompts and of slots, in memory that can be given back.

    slots: what the slots of the current step work on. prompt_of_token, position_of_token: of the row of prompts whose
    keys are stored, [n] int64; what follows them in the row is padding.
    """

    def __init__(self, shapes: dict[int, LayerShape], room: Room, device: torch.device, *, impl: str | None = None):
        self.impl = impl
        # One piece of memory, which is more likely to come back at the same address than many.
        sizes = [room.tokens * shape.bytes_per_token for shape in shapes.values()]
        self.memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        parts = zip(shapes.items(), self.memory.split(sizes), strict=True)
        self.layers = {layer: layer_cache(part, shape, room) for (layer, shape), part in parts}
        self.slots: Slots
        self.prompt_of_token: Tensor
        self.position_of_token: Tensor

    def tensors(self) -> list[Tensor]:
        return [tensor for layer in self.layers.values() for tensor in vars(layer).values()]

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        cache = self.layers[layer]
        place = self.prompt_of_token, slice(None), self.position_of_token
        for stored, tensor in ((cache.prompt_keys, key), (cache.prompt_values, value)):
            stored[place] = tensor[: len(self.prompt_of_token)].to(stored.dtype)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        # Rotary embeddings may leave queries and keys in fp32 where values are not.
        query, key = query.to(value.dtype), key.to(value.dtype)
        return decode_attention(
            query,
            key,
            value,
            self.layers[layer],
            self.slots,
            scale=scale,
            window=window,
            softcap=softcap,
            impl=self.impl,
        )

    def take_memory(self) -> None:
        """Where it was given back."""
        storage = self.memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.memory.numel())
            self.memory.zero_()

    def release_memory(self) -> None:
        """Gives it back until it is taken again, which it may be elsewhere."""
        self.memory.untyped_storage().resize_(0)

    def keep_slots(self, kept: Tensor) -> None:
        """kept: [n] int64, slots whose keys stay, in this order. They move to the front of their memory: copies of all
        would take as much again.
        """
        for layer in self.layers.values():
            for own in (layer.own_keys, layer.own_values):
                own[: len(kept)] = own[kept]
            layer.own_keys, layer.own_values = layer.own_keys[: len(kept)], layer.own_values[: len(kept)]


def layer_cache(memory: Tensor, shape: LayerShape, room: Room) -> LayerCache:
    """memory: bytes for keys and values of all tokens that there is room for."""
    of_prompts = (room.prompts, shape.heads, room.prompt_tokens, shape.head_size)
    of_slots = (room.slots, shape.heads, room.response_tokens, shape.head_size)
    sizes = [prod(of_prompts)] * 2 + [prod(of_slots)] * 2
    parts = memory.view(shape.dtype).split(sizes)
    return LayerCache(*(part.view(s) for part, s in zip(parts, [of_prompts] * 2 + [of_slots] * 2, strict=True)))


class LayerShapes:
    """A KeyValueCache that only looks at what it is given.

    Raises ValueError where the values' heads are not of the keys' size.
    """

    def __init__(self) -> None:
        self.found: dict[int, LayerShape] = {}

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise UserError(f"keys {list(key.shape)} and values {list(value.shape)} of layer {layer} differ in shape")
        self.found[layer] = LayerShape(value.shape[1], value.shape[2], value.dtype)

    def attend(self, *_: object, **__: object) -> Tensor:
        raise UserError("there are no responses to continue")
