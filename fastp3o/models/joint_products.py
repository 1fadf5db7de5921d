"""Layers that get the same input, such as q, k and v, or gate and up: one product of their weights side by side.

A step of the engine reads all weights for a few hundred tokens, and a product with a small weight takes its latency
rather than its bytes. Which layers get the same input, a pass of one token shows: no family is named. Their weights then
lie one after another in one piece of memory, of which each parameter is a part, so that nothing is there twice. The
parameters stay the objects that optimizers, states and checkpoints know, with their names, shapes and values. Layers
compute together within `JointProducts.used` alone: nothing that trains does.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastp3o.models.merging import has_adapter
from fastp3o.models.packed_model import PackedModel
from fastp3o_kernels import onednn


class JointProducts:
    """The layers of a model that may compute together: plain linear ones. None of a model with adapters, or whose layers
    a compiler has. a_pass: runs the model once.
    """

    def __init__(self, model: PackedModel, a_pass: Callable[[], object]):
        none = model.compiled or has_adapter(model.model)
        self.groups = [] if none else groups_with_one_input(model.model.base_model, a_pass)

    @contextmanager
    def used(self) -> Iterator[None]:
        """In the block, where nothing must be differentiated, the layers compute together. Those whose weights have no
        memory of their own, and do not lie side by side in what they share, compute as ever.
        """
        layers = []
        for group in self.groups:
            weight = side_by_side([layer.weight for layer in group])
            biases = [layer.bias for layer in group if layer.bias is not None]
            bias = side_by_side(biases) if biases else None
            if weight is not None and (bias is None) == (not biases):
                joint = JointProduct(group, weight, bias)
                for layer in group:
                    vars(layer)["forward"] = partial(joint.part, layer)
                layers += group
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]


class JointProduct:
    """The first layer that is called with an input computes the product; each takes its part. layers: [n_i, D] in
    turn. weight: [n, D]. bias: [n] or None.
    """

    def __init__(self, layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None):
        self.layers, self.weight, self.bias = layers, weight, bias
        self.input: Tensor | None = None
        self.parts: dict[nn.Linear, Tensor] = {}  # of this input, that nobody has taken yet

    def part(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """[..., D] -> [..., n_i], a view."""
        if x is not self.input or layer not in self.parts:
            parts = F.linear(x, self.weight, self.bias).split([one.out_features for one in self.layers], dim=-1)
            self.input, self.parts = x, dict(zip(self.layers, parts, strict=True))
        part = self.parts.pop(layer)
        if not self.parts:
            self.input = None
        return part


@torch.no_grad()
def groups_with_one_input(body: nn.Module, a_pass: Callable[[], object]) -> list[list[nn.Linear]]:
    """Plain linear layers that get the same tensor one right after another in a pass, each of them once."""
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
    groups = [[layer for layer, _ in group] for _, group in groupby(calls, key=lambda call: id(call[1]))]
    return [group for group in groups if len(group) > 1 and all(called.count(layer) == 1 for layer in group)]


def is_plain(layer: Any) -> bool:
    """Whether it is torch's linear layer, or ours with oneDNN's products, with whole weights and without hooks."""
    if type(layer) not in (nn.Linear, onednn.Linear) or "forward" in vars(layer):
        return False
    hooked = bool(layer._forward_hooks or layer._forward_pre_hooks)
    return not hooked and not any(isinstance(part, DTensor) for part in layer.parameters())


def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The parameters [n_i, ...] as one tensor [n, ...] of the same memory, into which those are moved that have memory
    of their own. None where they have not, or do not fit each other.
    """
    first = parameters[0]
    if any(part.shape[1:] != first.shape[1:] or part.dtype != first.dtype for part in parameters):
        return None
    if (found := adjoining(parameters)) is None and all(has_own_memory(part) for part in parameters):
        memory = torch.cat([part.detach() for part in parameters])
        for parameter, part in zip(parameters, memory.split([*map(len, parameters)]), strict=True):
            parameter.data = part
        found = adjoining(parameters)
    return found


def has_own_memory(parameter: Tensor) -> bool:
    return parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes


def adjoining(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The parameters as one tensor, if each begins where the one before it ends; else None."""
    first = parameters[0].detach()
    storage, end, rows = first.untyped_storage().data_ptr(), first.data_ptr(), 0
    for part in parameters:
        # Two pieces of memory may meet by chance.
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return None
        end, rows = end + part.nbytes, rows + len(part)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
