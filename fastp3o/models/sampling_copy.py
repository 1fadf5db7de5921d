"""The copy of a policy that is sampled: whole where the policy is spread over processes, in the
precision of its passes where its weights are finer, and without the adapters, which are merged into
it.
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fastp3o.models.merging import Weight, frozen, merged, named_weights, plain_copy, plain_modules
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import whole

# Elements; products of matrices that begin at a multiple of it are the fastest.
ALIGNMENT = 128
# Bits of an fp32 number that half precision has no room for.
LOST_BITS = {torch.bfloat16: 16, torch.float16: 13}


class SamplingCopy:
    """A whole copy of a model. Where the model is spread over processes, they read it without
    waiting for one another. A CUDA graph finds it at the same addresses. model: has its weights,
    and their memory, within `gathered` alone.
    """

    def __init__(
        self, model: PackedModel, device: torch.device, dtype: torch.dtype, *, merges: bool = False
    ):
        """model: not sharded yet. dtype: of the copy. merges: whether LoRA adapters are added to
        the weights that they adapt; a step launches five kernels for each adapter otherwise.
        """
        self.merges = merges
        weights = self.weights_of(model)
        copied = {name: weights[name] for name in side_by_side(weights)}
        sizes = [-(-weight.part.numel() // ALIGNMENT) * ALIGNMENT for weight in copied.values()]
        # One piece of memory, which is more likely to come back at the same address than many.
        self.memory = torch.empty(sum(sizes), dtype=dtype, device=device)
        self.bytes = self.memory.untyped_storage().nbytes()
        places = zip(copied.values(), self.memory.split(sizes), strict=True)
        parameters = [
            frozen(place[: part.numel()].view(part.shape)) for (_, part, _), place in places
        ]
        self.weights = dict(zip(copied, parameters, strict=True))
        adapted = [name for name, weight in weights.items() if weight.adapters]
        self.numbers = {name: number for number, name in enumerate(adapted)}
        if merges:
            self.model: PackedModel = plain_copy(model, self.weights).eval()
            vars(self.model.model).pop("peft_config", None)
        else:
            copies: dict[int, Any] = {
                id(weight.part): self.weights[name] for name, weight in copied.items()
            }
            self.model = copy.deepcopy(model, copies).eval()
        self.memory.untyped_storage().resize_(0)

    @contextmanager
    def gathered(self, model: PackedModel) -> Iterator[None]:
        """Within the block, the copy holds the model's weights."""
        self.memory.untyped_storage().resize_(self.bytes)
        self.gather(model)
        modules = (
            {place: module for place, module, _ in plain_modules(model)} if self.merges else None
        )
        for name, module in self.model.named_modules():
            module._buffers.update(
                (modules[name] if modules else model.get_submodule(name))._buffers
            )
        try:
            yield
        finally:
            self.memory.untyped_storage().resize_(0)

    def weights_of(self, model: PackedModel) -> dict[str, Weight]:
        """The parameters that a copy holds, by name."""
        if self.merges:
            weights = {weight.names[0]: weight for weight in named_weights(model)}
            return {
                name: weight
                for name, weight in weights.items()
                if isinstance(weight.part, nn.Parameter)
            }
        return {name: Weight([name], parameter, ()) for name, parameter in model.named_parameters()}

    @torch.no_grad()
    def gather(self, model: PackedModel) -> None:
        dtype, device = self.memory.dtype, self.memory.device
        weights = self.weights_of(model)
        for name, copied in self.weights.items():
            _, part, adapters = weights[name]
            if adapters:
                sum_ = merged(whole(part.detach()).to(device, torch.float32), adapters, dtype)
                copied.copy_(dithered(sum_, dtype, self.numbers[name]))
            else:
                # Rounded first: half as much is sent.
                copied.copy_(whole(part.detach().to(dtype)))


def side_by_side(names: Iterable[str]) -> list[str]:
    """Names of parameters, with those together whose layers belong to one module: an attention's
    weights, then its biases, as a product of several layers takes them (`joint_products`).
    """
    together: dict[tuple[str, str], list[str]] = {}
    for name in names:
        layer, _, own = name.rpartition(".")
        together.setdefault((layer.rpartition(".")[0], own), []).append(name)
    return [name for group in together.values() for name in group]


def dithered(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Rounds fp32 numbers to another dtype, up or down at random, so that their mean is preserved;
    numbers that the dtype holds are unchanged. At first an adapter adds less than half the distance
    to the next half-precision number. Rounding to nearest would discard everything that it has
    learned.
    """
    if dtype not in LOST_BITS:
        return values.to(dtype)
    step = 1 << LOST_BITS[dtype]
    generator = torch.Generator(values.device).manual_seed(seed)
    noise = torch.randint(
        step, values.shape, generator=generator, dtype=torch.int32, device=values.device
    )
    bits = noise.add_(values.contiguous().view(torch.int32)).bitwise_and_(-step)
    return bits.view(torch.float32).to(dtype)
