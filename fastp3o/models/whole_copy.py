"""A whole copy of a sharded model on each process, for the time in which it samples."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import whole

# Elements; products of matrices that begin there are the fastest.
ALIGNMENT = 128


class WholeCopy:
    """Plain tensors, which processes read without waiting for one another, and a CUDA graph at their addresses.

    model: filled within `gathered` alone; its memory is given back outside.
    """

    def __init__(self, model: PackedModel, device: torch.device, dtype: torch.dtype):
        """Of a model before it is sharded. dtype: of the passes."""
        parameters = list(model.parameters())
        rooms = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        # One piece of memory, which is more likely to come back at the same address than many.
        self.memory = torch.empty(sum(rooms), dtype=dtype, device=device)
        self.bytes = self.memory.untyped_storage().nbytes()
        places = zip(parameters, self.memory.split(rooms), strict=True)
        known: dict[int, object] = {
            id(parameter): nn.Parameter(room[: parameter.numel()].view(parameter.shape), requires_grad=False)
            for parameter, room in places
        }
        self.model: PackedModel = copy.deepcopy(model, known).eval()
        self.release_memory()

    def release_memory(self) -> None:
        self.memory.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self, sharded: PackedModel) -> Iterator[None]:
        """The weights of the sharded model, from all processes, for the time of a block."""
        self.memory.untyped_storage().resize_(self.bytes)
        parts = dict(sharded.named_parameters())
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                # Rounded first: half as much is sent.
                parameter.copy_(whole(parts[name].detach().to(parameter.dtype)))
        for name, module in self.model.named_modules():
            module._buffers.update(sharded.get_submodule(name)._buffers)
        try:
            yield
        finally:
            self.release_memory()
