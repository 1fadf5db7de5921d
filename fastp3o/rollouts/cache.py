"""Keys and values of all layers, and attention of tokens that each continue a response."""

import torch
from torch import Tensor

from fastp3o.rollouts.room import LayerShape, Room
from fastp3o_kernels.decoding import LayerCache, Slots, decode_attention


class Cache:
    """A KeyValueCache of prompts and of slots, in memory that can be given back.

    slots: what the slots of the current step work on. prompt_of_token, position_of_token: of the row of prompts whose
    keys are stored, [n] int64; what follows them in the row is padding.
    """

    def __init__(self, shapes: dict[int, LayerShape], room: Room, device: torch.device, *, impl: str | None = None):
        self.impl = impl
        self.layers = {layer: layer_cache(shape, room, device) for layer, shape in shapes.items()}
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
        options = {"scale": scale, "window": window, "softcap": softcap, "impl": self.impl}
        return decode_attention(query, key, value, self.layers[layer], self.slots, **options)

    def keep_slots(self, kept: Tensor) -> None:
        """kept: [n] int64, slots whose keys stay, in this order."""
        for layer in self.layers.values():
            layer.own_keys, layer.own_values = layer.own_keys[kept], layer.own_values[kept]


def layer_cache(shape: LayerShape, room: Room, device: torch.device) -> LayerCache:
    return LayerCache.zeros(
        room.prompts,
        room.prompt_tokens,
        room.slots,
        room.response_tokens,
        shape.heads,
        shape.head_size,
        dtype=shape.dtype,
        device=device,
    )


class LayerShapes:
    """A KeyValueCache that only looks at what it is given.

    Raises ValueError where the values' heads are not of the keys' size.
    """

    def __init__(self) -> None:
        self.found: dict[int, LayerShape] = {}

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise ValueError(f"keys {list(key.shape)} and values {list(value.shape)} of layer {layer} differ in shape")
        self.found[layer] = LayerShape(value.shape[1], value.shape[2], value.dtype)

    def attend(self, *_: object, **__: object) -> Tensor:
        raise ValueError("there are no responses to continue")
