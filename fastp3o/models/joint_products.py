"""Layers that get the same input, such as q, k and v, or gate and up: one product of their weights
side by side.

A step of the engine reads all weights for a few hundred tokens, and a product with a small weight
takes its latency rather than its bytes. Which layers get the same input, a pass of one token shows:
no family is named. Their weights then lie one after another in one piece of memory, of which each
parameter is a part, so that nothing is there twice. The parameters stay the objects that
optimizers, states and checkpoints know, with their names, shapes and values, and each has a storage
of its own. Layers compute together within `JointProducts.used` alone: nothing that trains does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate, groupby
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastp3o.models.merging import has_adapter
from fastp3o.models.packed_model import PackedModel
from fastp3o_kernels import onednn

KNOWN: "WeakKeyDictionary[PackedModel, JointProducts]" = WeakKeyDictionary()


def joint_products(model: PackedModel, a_pass: Callable[[], object]) -> "JointProducts":
    """The same for all who sample from a model: they would move its weights away from one another."""
    if model not in KNOWN:
        KNOWN[model] = JointProducts(model, a_pass)
    return KNOWN[model]


class JointProducts:
    """The layers of a model that may compute together: plain linear ones. None of a model with
    adapters, or of one that is compiled. a_pass: runs the model once.
    """

    def __init__(self, model: PackedModel, a_pass: Callable[[], object]):
        none = model.compiled or has_adapter(model.model)
        self.groups = [] if none else groups_with_one_input(model.model.base_model, a_pass)
        # By group and name of their parameters: those that were moved, as one tensor.
        self.moved: dict[tuple[int, str], Tensor] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """In the block, where nothing must be differentiated, the layers compute together. Those
        whose weights have no memory of their own, and do not lie side by side in what they share,
        compute as ever.
        """
        layers = []
        for number, group in enumerate(self.groups):
            if not all(map(is_plain, group)):
                continue
            weight, bias = self.side_by_side(number, "weight"), self.side_by_side(number, "bias")
            if weight is not None and (bias is None) == all(layer.bias is None for layer in group):
                joint = JointProduct(group, weight, bias)
                for layer in group:
                    vars(layer)["forward"] = partial(joint.part, layer)
                layers += group
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]

    def side_by_side(self, group: int, name: str) -> Tensor | None:
        """A group's weights or biases [n_i, ...] as one tensor [n, ...] of the same memory, into
        which those are moved that have memory of their own. None where they have not, or do not fit
        each other.
        """
        parameters = [getattr(layer, name) for layer in self.groups[group]]
        together = self.moved.pop((group, name), None)
        if not are_alike(parameters):
            return None
        if together is None or not lie_in(together, parameters):
            together = None  # gives its memory back before the next one takes any
            if (shared := in_shared_memory(parameters)) is not None:
                return shared
            if not all(map(has_own_memory, parameters)):
                return None
            together = moved_together(parameters)
        self.moved[group, name] = together
        return together


class JointProduct:
    """The first layer that is called with an input computes the product; each takes its part.
    layers: [n_i, D] in turn. weight: [n, D]. bias: [n] or None.
    """

    def __init__(self, layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None):
        self.layers, self.weight, self.bias = layers, weight, bias
        self.input: Tensor | None = None
        self.parts: dict[nn.Linear, Tensor] = {}  # of this input, that nobody has taken yet

    def part(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """[..., D] -> [..., n_i], a view."""
        if x is not self.input or layer not in self.parts:
            parts = F.linear(x, self.weight, self.bias).split(
                [one.out_features for one in self.layers], dim=-1
            )
            self.input, self.parts = x, dict(zip(self.layers, parts, strict=True))
        part = self.parts.pop(layer)
        if not self.parts:
            self.input = None
        return part


@torch.no_grad()
def groups_with_one_input(body: nn.Module, a_pass: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain linear layers that get the same tensor one right after another in a pass, each of them
    once.
    """
    calls: list[tuple[Any, Tensor]] = []  # holds the inputs, so that no two have one id
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: calls.append((layer, inputs[0])))
        for layer in body.modules()
        if is_plain(layer)
    ]
    try:
        a_pass()
    finally:
        for hook in hooks:
            hook.remove()
    called = [layer for layer, _ in calls]
    groups = [
        [layer for layer, _ in group] for _, group in groupby(calls, key=lambda call: id(call[1]))
    ]
    return [
        group
        for group in groups
        if len(group) > 1 and all(called.count(layer) == 1 for layer in group)
    ]


def is_plain(layer: Any) -> bool:
    """Whether it is torch's linear layer, or ours with oneDNN's products, with whole weights and
    without hooks.
    """
    if type(layer) not in (nn.Linear, onednn.Linear) or "forward" in vars(layer):
        return False
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks)
    return not hooked and not any(isinstance(part, DTensor) for part in layer.parameters())


def are_alike(parameters: Sequence[Tensor | None]) -> bool:
    """Whether one matrix or vector might hold them, and all are parameters: not copies that are
    there for a moment.
    """
    kinds = {part is not None and (part.shape[1:], part.dtype, part.device) for part in parameters}
    return len(kinds) == 1 and all(isinstance(part, nn.Parameter) for part in parameters)


def has_own_memory(parameter: Tensor) -> bool:
    return parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def lie_in(memory: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters take all of a tensor, one after another."""
    *begins, end = accumulate((part.nbytes for part in parameters), initial=memory.data_ptr())
    return end == memory.data_ptr() + memory.nbytes and all(
        part.is_contiguous() and part.data_ptr() == begin
        for part, begin in zip(parameters, begins, strict=True)
    )


def in_shared_memory(parameters: Sequence[Tensor]) -> Tensor | None:
    """The parameters as one tensor if they are parts of the same memory, one after another."""
    first = parameters[0].detach()
    storages = {part.untyped_storage().data_ptr() for part in parameters}
    rows = sum(map(len, parameters))
    end = first.storage_offset() * first.itemsize + sum(p.nbytes for p in parameters)
    if len(storages) > 1 or first.untyped_storage().nbytes() < end:
        return None
    together = first.as_strided((rows, *first.shape[1:]), first.stride())
    return together if lie_in(together, parameters) else None


def moved_together(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor, of which the parameters are parts from now on. To whoever looks, each has memory
    of its own, as those who save weights want it.
    """
    memory = torch.cat([part.detach() for part in parameters])
    begin, storage = 0, memory.untyped_storage()
    for parameter, part in zip(parameters, memory.split([*map(len, parameters)]), strict=True):
        own = storage[begin : begin + part.nbytes]
        parameter.data = part.new_empty(0).set_(own, 0, part.shape, part.stride())
        begin += part.nbytes
    return memory
