"""Weights, gradients and AdamW's moments spread over processes with torch's FSDP2: each holds a
part of every layer.

While a layer computes, each process has all of it, in the precision of the passes. The optimizer
moves the parts, which are fp32 masters where passes are in half precision. Gradients of each packed
row are added up over the processes in fp32, so every process must make equally many passes:
`pad_to_longest_rank`. `tensor_parallel.py` also cuts layers.

A single process has no mesh and keeps its model whole. A mesh of one gives the same bits, and took
9 to 160% longer on a CPU where layers were thin or rows short.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.models.tensor_parallel import cut
from fastp3o.packing.packed_row import ALIGNMENT, PackedRow, view_like

# Warns of gathers in two steps.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
Row = TypeVar("Row")
Result = TypeVar("Result")


# --- the processes that hold a model --------------------------------------------------------------


def process_mesh(
    device: torch.device, shard_size: int = 0, tensor_parallel: int = 1
) -> DeviceMesh | None:
    """The processes as [replicas, shards, tensor], without replicas if all hold one model and
    without tensor if none is cut; None for a single process. shard_size: processes over which FSDP2
    spreads a model, or its cut parts; 0 for all. tensor_parallel: processes over which layers are
    cut. Raises ValueError if processes do not divide evenly.
    """
    processes = number_of_processes()
    shards = shard_size or max(1, processes // tensor_parallel)
    if processes % (shards * tensor_parallel):
        sizes = f"--shard_size x --tensor_parallel ({shards} x {tensor_parallel})"
        raise UserError(f"{sizes} must divide the number of processes ({processes})")
    if processes == 1:
        return None
    mesh = {
        "replicas": processes // shards // tensor_parallel,
        "shards": shards,
        "tensor": tensor_parallel,
    }
    names = tuple(name for name, size in mesh.items() if size > 1 or name == "shards")
    return init_device_mesh(device.type, tuple(mesh[name] for name in names), mesh_dim_names=names)


def is_main_process() -> bool:
    """Whether this process is rank 0, which loads the weights."""
    return number_of_processes() == 1 or dist.get_rank() == 0


def number_of_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


# --- rows in lockstep: all processes of a shard make each pass together ---------------------------


def pad_to_longest_rank(rows: Sequence[Row], spare: Row) -> list[tuple[Row, bool]]:
    """The rows, then `spare` until there are as many as the process with most rows has; and whether
    each counts. Processes gather weights in every pass, so one that made fewer passes would leave
    the others waiting for ever: a row makes as many through the layers as the one that another
    process has at the same time. A row is or has a PackedRow.
    """
    return padded(rows, spare, *most_passes([rows]))


def most_passes(steps: Sequence[Sequence[Any]]) -> list[list[int]]:
    """For each step, the number of passes of each row: that of the process that needs the most.
    Every process must have the same number of steps.
    """
    needed = [[packed(row).passes for row in rows] for rows in steps]
    if number_of_processes() == 1:
        return needed
    gathered: list[list[list[int]]] = [[]] * number_of_processes()
    dist.all_gather_object(gathered, needed)
    return [
        [max(at_once) for at_once in zip_longest(*step, fillvalue=1)]
        for step in zip(*gathered, strict=True)
    ]


def padded(rows: Sequence[Row], spare: Row, passes: list[int]) -> list[tuple[Row, bool]]:
    filled = [(row, True) for row in rows] + [(spare, False)] * (len(passes) - len(rows))
    return [
        (with_passes(row, count), counts)
        for (row, counts), count in zip(filled, passes, strict=True)
    ]


def packed(row: Any) -> PackedRow:
    return row if isinstance(row, PackedRow) else row.row


def with_passes(row: Any, passes: int) -> Any:
    if packed(row).passes == passes:
        return row
    changed = replace(packed(row), passes=passes)
    return changed if row is packed(row) else replace(row, row=changed)


def map_rows_in_lockstep(rows: Sequence[Row], compute: Callable[[Row], Result]) -> list[Result]:
    """Computes each row, of which there must be at least one, with the same number of passes on
    every process.
    """
    return [compute(row) for row, _ in pad_to_longest_rank(rows, rows[0])][: len(rows)]


def with_tensor_group(model: PackedModel, items: list[Row]) -> tuple[list[Row], slice]:
    """The items of all processes that compute a model's layers together, and the slice of them that
    belongs to this process.
    """
    if model.cut_over is None:
        return items, slice(None)
    gathered: list[list[Row]] = [[]] * model.cut_over.size()
    dist.all_gather_object(gathered, items, group=model.cut_over.get_group())
    first = sum(map(len, gathered[: model.cut_over.get_local_rank()]))
    return [*chain.from_iterable(gathered)], slice(first, first + len(items))


# --- spreading a model ----------------------------------------------------------------------------


def loading_device(device: torch.device, mesh: DeviceMesh | None) -> torch.device:
    """The device that the main process loads a model to: the CPU if the device need not hold all of
    it.
    """
    return device if mesh is None else torch.device("cpu")


def shard(
    model: PackedModel,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Spreads a model over the mesh, in place, and moves this process's part to the device; all of
    it without a mesh.

    All processes get the main process's weights: elsewhere the model may be on the meta device.
    dtype: of the passes, to which frozen weights are rounded for good; None for that of the
    weights. offload: parts wait on the CPU.
    """
    if mesh is None:
        model.to(device)
        return
    for parameter in model.parameters():
        if dtype is not None and not parameter.requires_grad:
            # Buffers keep their dtype: rounded rotary frequencies would move every position.
            parameter.data = parameter.data.to(dtype)
    weights = RankZeroWeights(model)
    models = [module for module in model.modules() if isinstance(module, PackedModel)]
    names = cast(tuple[str, ...], mesh.mesh_dim_names)
    for one in models if "tensor" in names else ():
        cut(one, mesh["tensor"])
    options: dict[str, Any] = {
        "mesh": mesh[tuple(name for name in names if name != "tensor")],
        "shard_placement_fn": columns_of_uneven_rows,
        # Inputs are positions and tokens, and results of the head stay in fp32.
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda")
        if offload
        else OffloadPolicy(),
    }
    # Layers, and what an objective has added, are whole one at a time.
    layers = [layer for one in models for layer in one.layers()]
    for module in [*layers, *(child for child in model.children() if child is not model.model)]:
        fully_shard(module, **options)
    # Embeddings, head and last norm belong to the root: the head is whole within its forward call,
    # over all chunks. It stays whole for the backward pass, if there is one.
    trains = any(parameter.requires_grad for parameter in model.parameters())
    fully_shard(model, reshard_after_forward=None if trains else True, **options)
    weights.put_into(model, device, offload=offload)


def columns_of_uneven_rows(parameter: nn.Parameter) -> Shard | None:
    """How to shard a parameter whose rows a tensor group has cut unevenly: by columns, since torch
    mixes up rows that are cut twice. None for FSDP2's default, rows.
    """
    cut_by_rows = isinstance(parameter, DTensor) and parameter.placements == (Shard(0),)
    return (
        Shard(1)
        if cut_by_rows and len(parameter) % cast(DTensor, parameter).device_mesh.size()
        else None
    )


class RankZeroWeights:
    """The weights of rank 0, taken out of the model, which is left empty."""

    def __init__(self, model: nn.Module):
        is_main = is_main_process()
        # The main process may have weights as they are stored; the others have built what they
        # become.
        dtypes = [{name: parameter.dtype for name, parameter in model.named_parameters()}]
        dist.broadcast_object_list(dtypes, src=1)
        self.weights = dict(model.state_dict()) if is_main else {}
        # Some buffers are not in a state dict, such as the frequencies of rotary positions.
        buffers = model.named_buffers(remove_duplicate=False)
        self.buffers = [{name: buffer.cpu() for name, buffer in buffers} if is_main else None]
        empty(model)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[0][name])

    def put_into(self, model: nn.Module, device: torch.device, *, offload: bool) -> None:
        model.to_empty(device=device)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, self.weights, options=options)
        dist.broadcast_object_list(self.buffers, device=device)
        if offload:
            model.to("cpu")
        for name, module in model.named_modules():
            for buffer in module._buffers:
                if module._buffers[buffer] is not None:
                    module._buffers[buffer] = cast(dict, self.buffers[0])[
                        f"{name}.{buffer}".lstrip(".")
                    ].to(device)


def empty(model: nn.Module) -> None:
    """Moves a model to the meta device. Tied weights stay tied, which `Module.to` would part."""
    moved: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                on_meta = nn.Parameter(
                    torch.empty_like(parameter, device="meta"), parameter.requires_grad
                )
                module._parameters[name] = moved.setdefault(parameter, on_meta)
        for name, buffer in module._buffers.items():
            module._buffers[name] = (
                None if buffer is None else torch.empty_like(buffer, device="meta")
            )


def whole(tensor: Tensor) -> Tensor:
    """A sharded tensor, gathered on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- models that do not train ---------------------------------------------------------------------


class FrozenModel:
    """A model that does not train, whole or spread over a mesh. With `offload`, its weights are on
    the CPU, in pinned memory, and the device has a copy only while they are used.
    """

    def __init__(
        self, model: PackedModel, device: torch.device, mesh: DeviceMesh | None, *, offload: bool
    ):
        self.model, self.device = model.eval().requires_grad_(False), device
        self.offloaded = offload and mesh is None
        if not self.offloaded:
            shard(model, device, mesh, offload=offload)
            return
        model.to("cpu")
        if device.type == "cuda":
            pin(chain(model.parameters(), model.buffers()))

    @torch.no_grad()
    def map_rows(
        self, rows: Sequence[PackedRow], compute: Callable[[PackedModel, PackedRow], Result]
    ) -> list[Result]:
        """Calls `compute` with the model and each row, on the device."""
        with copied_to(self.device, self.model.modules()) if self.offloaded else nullcontext():
            return map_rows_in_lockstep(rows, partial(compute, self.model))


def pin(tensors: Iterable[Tensor]) -> None:
    """Moves tensors to pinned memory. torch rounds each block up to a power of two, so tensors
    share blocks, the largest first.
    """
    left = sorted(tensors, key=lambda tensor: tensor.nbytes, reverse=True)
    while left:
        block = (
            1 << max(left[0].nbytes - 1, sum(tensor.nbytes for tensor in left) // 2, 1).bit_length()
        )
        end, begins, others = 0, dict[Tensor, int](), list[Tensor]()
        for tensor in left:
            if end + tensor.nbytes > block:
                others.append(tensor)
                continue
            begins[tensor] = end
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        memory = torch.empty(end, dtype=torch.uint8, pin_memory=True)
        for tensor, begin in begins.items():
            tensor.data = view_like(tensor, memory, begin).copy_(tensor.data)
        left = others


@contextmanager
def computed_in(
    dtype: torch.dtype, model: PackedModel, device: torch.device | None = None
) -> Iterator[None]:
    """In the block, passes have parameters in this dtype: a layer's while it computes, the others'
    all the time. device: where they are then; by default where the model is.
    """
    device, layers = device or model.model.device, [*model.layers()]
    inside = {part for layer in layers for part in layer.modules()}
    with ExitStack() as block:
        block.enter_context(
            copied_to(device, [part for part in model.modules() if part not in inside], dtype)
        )
        own = block.enter_context(ExitStack())  # of the layer that computes
        for layer in layers:
            copied = partial(copied_to, device, [*layer.modules()], dtype)
            block.callback(
                layer.register_forward_pre_hook(
                    lambda *_, make=copied: own.enter_context(make())
                ).remove
            )
            block.callback(layer.register_forward_hook(lambda *_: own.close()).remove)
        yield


@contextmanager
def copied_to(
    device: torch.device, parts: Iterable[nn.Module], dtype: torch.dtype | None = None
) -> Iterator[None]:
    """In the block, modules have copies of their tensors on the device; tied ones stay tied.
    Nothing is copied back. dtype: of parameters there; None for their own.
    """
    owners: list[dict[str, Any]] = [
        held for part in parts for held in (part._parameters, part._buffers)
    ]
    places = [
        (tensors, name, tensor)
        for tensors in owners
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    copies: dict[Tensor, Any] = {}
    try:
        for tensors, name, tensor in places:
            if tensor not in copies:
                own = dtype if isinstance(tensor, nn.Parameter) else None
                copies[tensor] = tensor.detach().to(device, own, non_blocking=True)
            tensors[name] = copies[tensor]
        yield
    finally:
        for tensors, name, tensor in places:
            tensors[name] = tensor
