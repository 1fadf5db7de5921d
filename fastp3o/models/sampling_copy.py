"""The copy of a policy that is sampled: whole where the policy is spread over processes, in the precision of its passes
where its weights are finer, and without the adapters, which are merged into it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import whole
from fastp3o.models.trainable import lora_delta

# Elements; products of matrices that begin at a multiple of it are the fastest.
ALIGNMENT = 128
# Bits of an fp32 number that half precision has no room for.
LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}


class SamplingCopy:
    """A whole copy of a model. Where the model is spread over processes, they read it without waiting for one another.
    A CUDA graph finds it at the same addresses.

    If it does not fit the memory, one layer is whole at a time: each pass gathers all layers again, and a process that
    has made all of its passes goes on gathering for the others.

    model: has weights only within `gathered`; outside, its memory is given back.
    """

    def __init__(
        self,
        model: PackedModel,
        device: torch.device,
        dtype: torch.dtype,
        *,
        by_layer: bool = False,
        merges: bool = False,
    ):
        """model: not sharded yet. dtype: of the copy. merges: whether LoRA adapters are added to the weights that they
        adapt; a step launches five kernels for each adapter otherwise.
        """
        self.by_layer = by_layer
        adapted = {name: module for name, module in model.named_modules() if merges and hasattr(module, "base_layer")}
        names = {id(p): name for name, p in model.named_parameters() if not (adapted and ".lora_" in name)}
        layers = [[p for p in layer.parameters() if id(p) in names] for layer in model.layers()]
        in_layers = {id(parameter) for layer in layers for parameter in layer}
        # Weights outside the layers come first.
        outside = [p for p in model.parameters() if id(p) in names and id(p) not in in_layers]
        groups = [outside, *layers]
        sizes = [sum(map(aligned_size, group)) for group in groups]
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
                begin += aligned_size(parameter)
        self.groups = [{names[id(parameter)]: copies[id(parameter)] for parameter in group} for group in groups]
        for module in adapted.values():
            copies[id(module)] = copy.deepcopy(module.base_layer, copies)
        self.adapted = {f"{name}.base_layer.weight": name for name in adapted}
        self.numbers = {name: number for number, name in enumerate(self.adapted)}
        self.model: PackedModel = copy.deepcopy(model, copies).eval()
        if adapted:
            self.model.model._hf_peft_config_loaded = False
        if by_layer:
            for number, layer in enumerate(self.model.layers(), 1):
                layer.register_forward_pre_hook(partial(self.before_layer, number))
        self.original: PackedModel | None = None
        self.parts: dict[str, Tensor] = {}
        self.release_memory()

    def release_memory(self) -> None:
        self.memory.untyped_storage().resize_(0)
        self.original, self.parts = None, {}

    @contextmanager
    def gathered(self, model: PackedModel) -> Iterator[None]:
        """Within the block, the copy has the weights of the model."""
        self.memory.untyped_storage().resize_(self.bytes)
        self.original, self.parts = model, {name: p.detach() for name, p in model.named_parameters()}
        for group in self.groups[:1] if self.by_layer else self.groups:
            self.gather(group)
        for name, module in self.model.named_modules():
            module._buffers.update(model.get_submodule(name)._buffers)
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
            if name in self.adapted:
                parameter.copy_(self.merged(name, parameter.dtype))
            else:
                # Rounded first: half as much is sent.
                parameter.copy_(whole(self.parts[name].to(parameter.dtype)))

    def merged(self, name: str, dtype: torch.dtype) -> Tensor:
        """A weight with what its adapter adds to it."""
        assert self.original is not None
        layer, adapter = self.original.get_submodule(self.adapted[name]), self.original.model.active_adapters()[0]
        weight = whole(self.parts[name]).to(self.memory.device, torch.float32)
        return dithered(weight + lora_delta(layer, adapter, dtype).to(weight.device), dtype, self.numbers[name])

    def before_layer(self, number: int, *_: object) -> None:
        if number == 1:
            self.anybody_passes(True)
        self.gather(self.groups[number])

    def anybody_passes(self, this_one: bool) -> bool:
        """Whether any process begins a pass now. All ask before each pass, and until none does."""
        passing = torch.tensor(int(this_one), device=self.memory.device)
        dist.all_reduce(passing)
        return bool(passing)


def aligned_size(parameter: nn.Parameter) -> int:
    """Elements that a parameter takes, with those left free after it."""
    return -(-parameter.numel() // ALIGNMENT) * ALIGNMENT


def dithered(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """fp32 numbers in another precision, rounded up or down at random, so that their mean stays. Numbers that fit stay.

    What an adapter adds is at first less than half the distance to the next number of half precision, and would be
    rounded off everywhere; so would all that it has learned.
    """
    if dtype not in LOST_BITS:
        return values.to(dtype)
    step = 1 << LOST_BITS[dtype]
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(step, values.shape, generator=generator, dtype=torch.int32, device=values.device)
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-step)
    return bits.view(torch.float32).to(dtype)
