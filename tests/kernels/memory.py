"""The most memory that tensors took at once within a block, on any device: what operations returned and still lives."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """bytes: the peak, of storages made within the block. largest: of one storage."""

    def __init__(self, *existing: torch.Tensor):
        super().__init__()
        self.peak = self.largest = 0
        self.existing = {tensor.untyped_storage()._cdata for tensor in existing}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.existing:
                    self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return results
