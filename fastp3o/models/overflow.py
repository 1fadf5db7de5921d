"""Whether fp16 can hold what a model computes: the largest values of what enters and leaves each of
its modules.

Some models, such as Gemma 3, add up values in their residual streams that fp16 has no numbers for.
What comes of that is NaN, everywhere and at once, so the module and its value are looked for where
they arise.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf, isfinite, isnan
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel, evaluation_mode
from fastp3o.models.quantized import quantized_layers
from fastp3o.models.sharding import computed_in, number_of_processes
from fastp3o.packing.packed_row import PackedRow

LARGEST = torch.finfo(torch.float16).max
# A few tokens have not met the largest values that there are, and values grow while a model trains.
MARGIN = 2.0


class Overflow(NamedTuple):
    """Values that fp16 does not hold. place: the module that they enter or leave. value: the
    largest of them, as fp32 has it; infinite where that is not known. happened: whether fp16 was
    left, or its end is only near.
    """

    place: str
    value: float
    happened: bool = True

    def __str__(self) -> str:
        if self.value == inf:
            return f"{self.place} is beyond {LARGEST:,.0f}, fp16's maximum"
        if isnan(self.value):
            return f"{self.place} is NaN, in fp32 too"
        if self.happened and self.value <= LARGEST:
            return f"{self.place} is not finite in fp16, though in fp32 it reaches only {self.value:,.0f}"
        return f"{self.place} reaches {self.value:,.0f}, and fp16's maximum is {LARGEST:,.0f}"


class OverflowsError(UserError):
    """fp16 does not hold the weights or the activations of the model with this name."""

    def __init__(self, name: str, overflow: Overflow):
        super().__init__(f"{name} overflows fp16: {overflow}: use another --precision")
        self.overflow = overflow


class Activation(NamedTuple):
    """The input or output of a module. value: its largest absolute value; NaN or infinite if any
    element is.
    """

    value: float
    dtype: torch.dtype


@torch.no_grad()
def activations(model: PackedModel, row: PackedRow) -> dict[str, Activation]:
    """The activations of a pass over a row by place, in the order in which they are computed."""
    values: dict[str, Tensor] = {}
    dtypes: dict[str, torch.dtype] = {}

    def note(place: str, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.numel():
                value = torch.linalg.vector_norm(tensor, inf).float()
                values[place] = torch.maximum(value, values.get(place, value))
                dtypes[place] = tensor.dtype

    with evaluation_mode(model), watched(model.model, note):
        model(row, row.ends_at, lambda hidden, _: hidden)
    largest = torch.stack([*values.values()]).tolist()
    return {
        place: Activation(value, dtypes[place])
        for place, value in zip(values, largest, strict=True)
    }


@contextmanager
def watched(model: nn.Module, note: Callable[[str, Sequence[Any]], None]) -> Iterator[None]:
    """In the block, `note` gets the place and the values of what enters and leaves the model's
    modules.
    """
    handles = []
    for name, module in model.named_modules():
        if name:

            def enters(_: nn.Module, values: Any, name: str = name) -> None:
                note(f"what enters {name}", values)

            def leaves(_: nn.Module, __: Any, values: Any, name: str = name) -> None:
                note(name, values if isinstance(values, tuple) else (values,))

            handles += [
                module.register_forward_pre_hook(enters),
                module.register_forward_hook(leaves),
            ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def overflow(
    model: PackedModel, row: PackedRow, device: torch.device | None = None
) -> Overflow | None:
    """What fp16 does not hold in a pass over a row; None if it holds all, with room for more. What
    a module computes in fp32, whatever the dtype of its weights, does not overflow. device: where
    that is computed, a layer of the model at a time; by default where the model is. Quantized
    weights, and those that are spread over processes, stay as they are: all of these must call it.
    """
    device = device or model.model.device
    row = row.to(device)
    quantized = bool(quantized_layers(model))
    stays = quantized or spread(model)

    # 1. A pass in fp16. A residual stream in fp32 beside weights in half precision holds what they
    #    do not, so only values of the weights' dtype count.
    is_fp16 = (model.model.dtype, model.model.device.type) == (torch.float16, device.type)
    with nullcontext() if stays or is_fp16 else computed_in(torch.float16, model, device):
        seen = activations(model, row)
    dtype = model.model.dtype if quantized else torch.float16
    narrow = {place: one.value for place, one in seen.items() if one.dtype == dtype}
    broken = next((place for place, value in narrow.items() if not isfinite(value)), None)
    if broken is None:
        place = max(narrow, key=narrow.__getitem__)
        largest = narrow[place]
        is_near = largest * MARGIN > LARGEST
        return Overflow(place, largest, happened=largest > LARGEST) if is_near else None
    if stays:
        return Overflow(broken, inf)

    # 2. A pass in fp32 says how large the values at these places are.
    with computed_in(torch.float32, model, device):
        seen = activations(model, row)
    wide = {place: one.value for place, one in seen.items() if place in narrow}
    not_finite = [place for place, value in wide.items() if not isfinite(value)]
    place = not_finite[0] if not_finite else max(wide, key=wide.__getitem__)
    # A sum within a module may overflow though its result does not.
    is_held = wide[place] <= LARGEST
    return Overflow(broken if is_held else place, wide[place])


def overflow_in_fp16(
    model: PackedModel, row: PackedRow, device: torch.device | None = None
) -> Overflow | None:
    """The `overflow` of a model whose weights are in fp16; None for other dtypes."""
    return overflow(model, row, device) if model.model.dtype == torch.float16 else None


def not_finite_error(model: PackedModel, row: PackedRow, name: str) -> UserError:
    """The error for a pass over a row that gives values that are not finite; it says why, for the
    dtype of the model's weights.
    """
    dtype = model.model.dtype
    if happened(found := overflow_in_fp16(model, row)):
        return OverflowsError(name, cast(Overflow, found))
    places = (place for place, one in activations(model, row).items() if not isfinite(one.value))
    where = next(places, "its head")
    return UserError(
        f"{name} gives values that are not finite in {dtype}: {where} is the first that is NaN or infinite"
    )


def weight_overflow(model: PackedModel) -> Overflow | None:
    """The first weight that fp16 cannot hold."""
    for name, weight in model.model.named_parameters():
        if (
            weight.is_floating_point()
            and (value := torch.linalg.vector_norm(weight.detach(), inf).item()) > LARGEST
        ):
            return Overflow(f"the weight {name}", value)
    return None


def spread(model: PackedModel) -> bool:
    """Whether the model is sharded over processes."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def first_overflow(found: Iterable[Overflow | None]) -> Overflow | None:
    """The first overflow that any process has found. All processes must call it."""
    if number_of_processes() == 1:
        return next(filter(happened, found), None)
    return next(filter(happened, gather_object([*found])), None)


def happened(found: Overflow | None) -> bool:
    return found is not None and found.happened
