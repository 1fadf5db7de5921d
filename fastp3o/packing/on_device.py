"""Moves nested tensors to a device without a wait of the host: in one copy, from pinned memory."""

from collections.abc import Sequence
from dataclasses import fields
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
        def values(row: Any) -> tuple[list[Any], None]:
            return [getattr(row, field.name) for field in fields(row) if field.init], None

        register_pytree_node(cls, values, lambda values, _: cls(*values))

    def to(self, device: torch.device) -> Any:
        return to_device(self, device)


def to_device(value: Any, device: torch.device) -> Any:
    """The value with all tensors in it on the device: a tensor, an OnDevice, or tuples, lists and dicts of them.

    The host does not wait for tensors that go from its memory to a GPU.
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
