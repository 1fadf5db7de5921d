"""A whole copy of a sharded model on each process, to sample from."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import whole

# Elements; products of matrices that begin there are the fastest.
ALIGNMENT = 128


class WholeCopy:
    """Plain tensors, which processes read without waiting for one another, and a CUDA graph at their addresses.

    If they do not fit the memory, one layer is whole at a time: each pass gathers all layers again, and a process that
    has made all of its passes goes on gathering for the others.

    model: has weights only within `gathered`; outside, its memory is given back.
    """

    def __init__(self, model: PackedModel, device: torch.device, dtype: torch.dtype, *, by_layer: bool = False):
        """model: not sharded yet. dtype: of the passes."""
        self.by_layer = by_layer
        layers = [list(layer.parameters()) for layer in model.layers()]
        of_layers = {id(parameter) for layer in layers for parameter in layer}
        # Weights outside the layers come first.
        groups = [[parameter for parameter in model.parameters() if id(parameter) not in of_layers], *layers]
        sizes = [sum(map(room_of, group)) for group in groups]
        begins = [0, *(sizes[0] if by_layer else sum(sizes[:number]) for number in range(1, len(groups)))]
        # One piece of memory, which is more likely to come back at the same address than many.
        elements = max(begin + size for begin, size in zip(begins, sizes, strict=True))
        self.memory = torch.empty(elements, dtype=dtype, device=device)
        self.bytes = self.memory.untyped_storage().nbytes()
        copies: dict[int, Any] = {}
        for group, begin in zip(groups, begins, strict=True):
            for parameter in group:
                place = self.memory[begin : begin + parameter.numel()].view(parameter.shape)
                copies[id(parameter)] = nn.Parameter(place, requires_grad=False)
                begin += room_of(parameter)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.groups = [{names[id(parameter)]: copies[id(parameter)] for parameter in group} for group in groups]
        self.model: PackedModel = copy.deepcopy(model, copies).eval()
        if by_layer:
            for number, layer in enumerate(self.model.layers(), 1):
                layer.register_forward_pre_hook(partial(self.before_layer, number))
        self.parts: dict[str, torch.Tensor] = {}
        self.release_memory()

    def release_memory(self) -> None:
        self.memory.untyped_storage().resize_(0)
        self.parts = {}

    @contextmanager
    def gathered(self, sharded: PackedModel) -> Iterator[None]:
        """Within the block, the copy has the weights of the sharded model."""
        self.memory.untyped_storage().resize_(self.bytes)
        self.parts = {name: parameter.detach() for name, parameter in sharded.named_parameters()}
        for group in self.groups[:1] if self.by_layer else self.groups:
            self.gather(group)
        for name, module in self.model.named_modules():
            module._buffers.update(sharded.get_submodule(name)._buffers)
        try:
            yield
        finally:
            while self.by_layer and self.anybody_passes(False):
                for layer in self.groups[1:]:
                    self.gather(layer)
            self.release_memory()

    @torch.no_grad()
    def gather(self, parameters: dict[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            # Rounded first: half as much is sent.
            parameter.copy_(whole(self.parts[name].to(parameter.dtype)))

    def before_layer(self, number: int, *_: object) -> None:
        if number == 1:
            self.anybody_passes(True)
        self.gather(self.groups[number])

    def anybody_passes(self, this_one: bool) -> bool:
        """Whether any process begins a pass now. All ask before each pass, and until none does."""
        passing = torch.tensor(int(this_one), device=self.memory.device)
        dist.all_reduce(passing)
        return bool(passing)


def room_of(parameter: nn.Parameter) -> int:
    """Elements that it takes, with those left free after it."""
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
