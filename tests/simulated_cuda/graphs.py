"""CUDA graphs: a capture notes operations in place of running them, and a replay runs them on the same memory.

Memory that a capture allocates is the graph's own. All other memory it knows by its address: a replay after that was
freed or has moved would read garbage on a GPU, and raises here.
"""

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_cuda.host import host
from tests.simulated_cuda.native import library
from tests.simulated_cuda.record import note_launch


class Address:
    """A tensor in memory that does not belong to the graph."""

    def __init__(self, values: Tensor):
        storage = values.untyped_storage()
        self.storage, self.first, self.bytes = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()
        self.dtype, self.view = values.dtype, (values.storage_offset(), values.size(), values.stride())

    def values(self) -> Tensor:
        if self.storage.expired():
            raise RuntimeError("a CUDA graph reads or writes memory that has been freed")
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage.data_ptr() != self.first or storage.nbytes() < self.bytes:
            raise RuntimeError("a CUDA graph reads or writes memory that has moved")
        return torch.empty(0, dtype=self.dtype).set_(storage, *self.view)


class Operation(NamedTuple):
    """function: on values in CPU memory. results: where its results go, tensors of the graph's own memory."""

    function: Callable
    args: tuple
    kwargs: dict
    results: list[Tensor]


class Capture:
    """Operations in the order of their launches, on one device. invalid: something happened that no graph can hold."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.operations: list[Operation] = []
        self.own: dict[int, torch.UntypedStorage] = {}
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.invalid = False

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

    def add(self, function: Callable, args: tuple, kwargs: dict, result: Any, *, launched: bool) -> None:
        """args, kwargs, result: of an operation that ran on values in CPU memory. launched: whether a kernel ran, and
        not only a view or an allocation.
        """
        given = {storage_of(value)._cdata for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        held = tree_map(self.held, (args, kwargs))
        results = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        for value in results:
            if storage_of(value)._cdata not in given:
                self.own[storage_of(value)._cdata] = storage_of(value)
        if launched:
            self.operations.append(Operation(function, *held, results))

    def held(self, value: Any) -> Any:
        if isinstance(value, Tensor) and storage_of(value)._cdata not in self.own:
            return Address(value)
        return value


def storage_of(values: Tensor) -> torch.UntypedStorage:
    return values.untyped_storage()


class CUDAGraph:
    """In the place of torch.cuda.CUDAGraph.

    As in torch 2.11, the allocator does not learn that a capture has ended that failed: `empty_cache` asserts
    afterwards, until the pool is ended.
    """

    captures_under_way: ClassVar[set[tuple[int, int]]] = set()
    pools = 0

    def __init__(self, keep_graph: bool = False):
        self.captured: Capture | None = None

    def capture_begin(self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global", **_: Any) -> None:
        self.own_pool = new_pool() if pool is None else pool
        CUDAGraph.captures_under_way.add(self.own_pool)
        host.capture = Capture(library().current_device())

    def capture_end(self) -> None:
        capture, host.capture = host.capture, None
        capture.restore_contents()
        if capture.invalid:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        CUDAGraph.captures_under_way.discard(self.own_pool)
        self.captured = capture

    def pool(self) -> tuple[int, int]:
        return self.own_pool

    def reset(self) -> None:
        self.captured = None

    def replay(self) -> None:
        note_launch("graph")
        assert self.captured is not None
        for function, args, kwargs, results in self.captured.operations:
            args, kwargs = tree_map(lambda held: held.values() if isinstance(held, Address) else held, (args, kwargs))
            again = [value for value in tree_leaves(function(*args, **kwargs)) if isinstance(value, Tensor)]
            for target, value in zip(results, again, strict=True):
                if storage_of(target)._cdata != storage_of(value)._cdata:
                    target.copy_(value)


def new_pool() -> tuple[int, int]:
    CUDAGraph.pools += 1
    return 0, CUDAGraph.pools


def end_pool(pool: tuple[int, int]) -> None:
    CUDAGraph.captures_under_way.discard(pool)
