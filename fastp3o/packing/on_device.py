"""Moves nested tensors to a device without a wait of the host: in one copy, from pinned memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# Bytes; kernels load whole vectors from addresses that are a multiple of it.
ALIGNMENT = 128


@dataclass(frozen=True)
class OnDevice:
    """A dataclass whose tensors move together."""

    def to(self, device: torch.device) -> Any:
        return to_device(self, device)


def to_device(value: Any, device: torch.device) -> Any:
    """The value with all tensors in it on the device: a tensor, an OnDevice, or a tuple or dict of them.

    The host does not wait for tensors that go from its memory to a GPU.
    """
    tensors: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return tensor

    with_tensors(value, collect)
    moved = iter(upload(tensors, device) if device.type == "cuda" else [tensor.to(device) for tensor in tensors])
    return with_tensors(value, lambda _: next(moved))


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with the results of `change` in place of its tensors, always in the same order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, OnDevice):
        return type(value)(**{field.name: with_tensors(getattr(value, field.name), change) for field in fields(value)})
    if isinstance(value, dict):
        return {name: with_tensors(part, change) for name, part in value.items()}
    return tuple(with_tensors(part, change) for part in value) if isinstance(value, tuple) else value


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
