"""The most memory that tensors took at once within a block, on any device: what operations returned
and still lives.
"""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """bytes: the peak, of storages made within the block. largest: of one storage."""

    def __init__(self):
        super().__init__()
        self.peak = self.largest = 0
        self.before: dict[int, StorageWeakRef] = {}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Results may be views of what was there before.
        for storage in storages((args, kwargs)):
            if storage._cdata not in self.alive:
                self.before[storage._cdata] = StorageWeakRef(storage)
        results = func(*args, **(kwargs or {}))
        for storage in storages(results):
            # A new storage may have the address of one that is gone.
            known = self.before.get(storage._cdata)
            if known is None or known.expired():
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {
            key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()
        }
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return results


def storages(tree: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
