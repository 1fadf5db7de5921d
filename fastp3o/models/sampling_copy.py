"""The copy of a policy that is sampled: whole where the policy is spread over processes, in the precision of its passes
where its weights are finer, and without the adapters, which are merged into it.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
    A CUDA graph finds it at the same addresses. model: has its weights, and their memory, within `gathered` alone.
    """

    def __init__(self, model: PackedModel, device: torch.device, dtype: torch.dtype, *, merges: bool = False):
        """model: not sharded yet. dtype: of the copy. merges: whether LoRA adapters are added to the weights that they
        adapt; a step launches five kernels for each adapter otherwise.
        """
        adapted = {name: module for name, module in model.named_modules() if merges and hasattr(module, "base_layer")}
        copied = {name: p for name, p in model.named_parameters() if not (adapted and ".lora_" in name)}
        sizes = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in copied.values()]
        # One piece of memory, which is more likely to come back at the same address than many.
        self.memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.bytes = self.memory.untyped_storage().nbytes()
        places = zip(copied.values(), self.memory.split(sizes), strict=True)
        parameters = [nn.Parameter(place[: p.numel()].view(p.shape), requires_grad=False) for p, place in places]
        self.weights = dict(zip(copied, parameters, strict=True))
        copies: dict[int, Any] = {id(parameter): self.weights[name] for name, parameter in copied.items()}
        for module in adapted.values():
            copies[id(module)] = copy.deepcopy(module.base_layer, copies)
        self.adapted = {f"{name}.base_layer.weight": name for name in adapted}
        self.numbers = {name: number for number, name in enumerate(self.adapted)}
        self.model: PackedModel = copy.deepcopy(model, copies).eval()
        if adapted:
            del self.model.model.peft_config
        self.memory.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self, model: PackedModel) -> Iterator[None]:
        """Within the block, the copy has the weights of the model."""
        self.memory.untyped_storage().resize_(self.bytes)
        self.gather(model)
        for name, module in self.model.named_modules():
            module._buffers.update(model.get_submodule(name)._buffers)
        try:
            yield
        finally:
            self.memory.untyped_storage().resize_(0)

    @torch.no_grad()
    def gather(self, model: PackedModel) -> None:
        parameters, dtype, device = dict(model.named_parameters()), self.memory.dtype, self.memory.device
        for name, copied in self.weights.items():
            if name in self.adapted:
                layer = model.get_submodule(self.adapted[name])
                merged = whole(parameters[name]).to(device, torch.float32)
                merged = merged + lora_delta(layer, dtype).to(device)
                copied.copy_(dithered(merged, dtype, self.numbers[name]))
            else:
                # Rounded first: half as much is sent.
                copied.copy_(whole(parameters[name].detach().to(dtype)))


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
