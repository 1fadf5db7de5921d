"""CUDA graphs: a capture notes operations in place of running them, and a replay runs them on the
same memory.

Memory that a capture allocates is the graph's own. All other memory it knows by its address: a
replay after that was freed or has moved would read garbage on a GPU, and raises here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_cuda.host import host, note_launch
from tests.simulated_cuda.native import library


class Address:
    """A tensor in memory that does not belong to the graph."""

    def __init__(self, values: Tensor):
        storage = values.untyped_storage()
        self.storage, self.first, self.bytes = (
            StorageWeakRef(storage),
            storage.data_ptr(),
            storage.nbytes(),
        )
        self.dtype, self.view = (
            values.dtype,
            (values.storage_offset(), values.size(), values.stride()),
        )

    def values(self) -> Tensor:
        if self.storage.expired():
            raise RuntimeError("a CUDA graph reads or writes memory that has been freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage.data_ptr() != self.first or storage.nbytes() < self.bytes:
            raise RuntimeError("a CUDA graph reads or writes memory that has moved")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


class Capture:
    """Operations in the order of their launches, on one device: functions on values in CPU memory,
    their arguments, and where their results go, tensors of the graph's own memory.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.operations: list[tuple[Callable, tuple, dict, list[Tensor]]] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def keep_contents(self, written: list[Tensor]) -> None:
        """Notes what memory holds before an operation writes to it: a capture runs nothing."""
        for values in written:
            storage = values.untyped_storage()
            if storage._cdata not in self.own and storage._cdata not in self.before:
                self.before[storage._cdata] = storage, storage.clone()

    def restore_contents(self) -> None:
        for storage, contents in self.before.values():
            storage.copy_(contents)
        self.before.clear()

    def add(
        self, function: Callable, args: tuple, kwargs: dict, result: Any, *, launched: bool
    ) -> None:
        """args, kwargs, result: of an operation on values in CPU memory. launched: whether a kernel
        ran.
        """
        given = {
            identity(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)
        }
        held = tree_map(self.held, (args, kwargs))
        results = tensors_in(result)
        self.own |= {
            identity(value): value.untyped_storage()
            for value in results
            if identity(value) not in given
        }
        if launched:
            self.operations.append((function, *held, results))

    def held(self, value: Any) -> Any:
        return (
            Address(value)
            if isinstance(value, Tensor) and identity(value) not in self.own
            else value
        )


def identity(values: Tensor) -> int:
    """Of its memory."""
    return values.untyped_storage()._cdata


def tensors_in(result: Any) -> list[Tensor]:
    return [value for value in tree_leaves(result) if isinstance(value, Tensor)]


class CUDAGraph:
    """In the place of torch.cuda.CUDAGraph."""

    def __init__(self, keep_graph: bool = False):
        self.captured: Capture | None = None

    def capture_begin(self, *_: Any, **__: Any) -> None:
        host.capture = Capture(library().current_device())

    def capture_end(self) -> None:
        self.captured, host.capture = host.capture, None
        self.captured.restore_contents()

    def replay(self) -> None:
        note_launch("graph")
        assert self.captured is not None
        for function, args, kwargs, results in self.captured.operations:
            args, kwargs = tree_map(
                lambda held: held.values() if isinstance(held, Address) else held, (args, kwargs)
            )
            for target, value in zip(results, tensors_in(function(*args, **kwargs)), strict=True):
                if identity(target) != identity(value):
                    target.copy_(value)
