"""Counts what kernels do while Triton interprets them: bytes loaded and stored, and launches."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from triton.runtime import interpreter


class Traffic:
    """loaded, stored: bytes by all accesses. memory: bytes at different addresses, each read or
    written once.
    """

    def __init__(self):
        self.loaded = self.stored = 0
        self.addresses: dict[str, list[np.ndarray]] = {"loaded": [], "stored": []}

    def add(self, kind: str, pointers: np.ndarray, mask: np.ndarray, element_bytes: int) -> None:
        pointers, mask = np.broadcast_arrays(pointers, mask)
        touched = pointers[mask]
        setattr(self, kind, getattr(self, kind) + touched.size * element_bytes)
        self.addresses[kind].append(
            np.stack([touched.ravel(), np.full(touched.size, element_bytes, np.uint64)])
        )

    @property
    def memory(self) -> int:
        different = [
            np.unique(np.concatenate(parts, axis=1), axis=1)
            for parts in self.addresses.values()
            if parts
        ]
        return sum(int(part[1].sum()) for part in different)


@contextmanager
def counted_traffic(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    """Counts the bytes that interpreted kernels load and store, masked lanes left out."""
    traffic = Traffic()
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self, pointers, mask, *rest):
        result = load(self, pointers, mask, *rest)
        traffic.add("loaded", pointers.data, mask.data, result.data.dtype.itemsize)
        return result

    def counted_store(self, pointers, value, mask, *rest):
        traffic.add("stored", pointers.data, mask.data, value.data.dtype.itemsize)
        return store(self, pointers, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(builder, "create_masked_load", counted_load)
        patch.setattr(builder, "create_masked_store", counted_store)
        yield traffic


@contextmanager
def counted_launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    """Counts launches by kernel name."""
    launches: Counter = Counter()
    run = interpreter.GridExecutor.__call__

    def counted_run(self, *args, **kwargs):
        launches[self.fn.__name__] += 1
        return run(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(interpreter.GridExecutor, "__call__", counted_run)
        yield launches
