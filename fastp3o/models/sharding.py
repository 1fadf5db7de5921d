"""Weights, gradients and AdamW's moments spread over processes with torch's FSDP2: each holds a part of every layer.

A layer is whole, in the precision of the passes, while it computes. What stays are parts, which the optimizer moves:
the fp32 masters of half-precision weights are the parameters themselves. Gradients of each packed row are added up over
the processes in fp32, so every process must make equally many passes: `in_step`.

A single process has no mesh and keeps its model whole. A mesh of one gives the same bits, and took 9 to 160% longer on
a CPU where layers were thin or rows short.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fastp3o.models.packed_model import PackedModel

Row = TypeVar("Row")
Result = TypeVar("Result")


def process_mesh(device: torch.device, shard_size: int = 0) -> DeviceMesh | None:
    """The processes as [replicas, shards], or as one group of shards; None for a single process.

    shard_size: processes that hold one model together; 0 for all.

    Raises ValueError where the processes do not divide evenly into such groups.
    """
    processes = number_of_processes()
    if processes == 1:
        return None
    size = shard_size or processes
    if processes % size:
        raise ValueError(f"--shard_size ({size}) must divide the number of processes ({processes})")
    if size == processes:
        return init_device_mesh(device.type, (size,))
    return init_device_mesh(device.type, (processes // size, size), mesh_dim_names=("replicas", "shards"))


def is_main_process() -> bool:
    """Whether this process is the one that loads weights."""
    return number_of_processes() == 1 or dist.get_rank() == 0


def number_of_processes() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def loading_device(device: torch.device, mesh: DeviceMesh | None) -> torch.device:
    """Where the main process loads a model: not on a device that need not hold the whole of it."""
    return device if mesh is None else torch.device("cpu")


def shard(
    model: PackedModel,
    device: torch.device,
    mesh: DeviceMesh | None,
    *,
    dtype: torch.dtype | None = None,
    offload: bool = False,
) -> None:
    """Spreads a model over the mesh, in place, and brings this process's part to the device; a whole model without one.

    The main process's weights are everyone's: elsewhere the model may be on the meta device.

    dtype: of the passes, to which what is frozen is rounded for good; None for that of the weights. offload: the parts
    are on the CPU between uses.
    """
    if mesh is None:
        model.to(device)
        return
    for parameter in model.parameters():
        if dtype is not None and not parameter.requires_grad:
            # Buffers stay as they are: rounded rotary frequencies would move every position.
            parameter.data = parameter.data.to(dtype)
    given = Given(model)
    options: dict[str, Any] = {
        "mesh": mesh,
        # Inputs are positions and tokens, and results of the head stay in fp32.
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload else OffloadPolicy(),
    }
    for unit in units(model):
        fully_shard(unit, **options)
    # Embeddings, head and last norm belong to the root: the head is whole within its forward call, over all chunks. It
    # stays so for the backward pass, where there is one.
    trains = any(parameter.requires_grad for parameter in model.parameters())
    fully_shard(model, reshard_after_forward=None if trains else True, **options)
    given.put_into(model, device, offload=offload)


def units(model: PackedModel) -> Iterator[nn.Module]:
    """What is whole at one time: layers, and what an objective has added to the model. The rest is one more."""
    for module in model.modules():
        if isinstance(module, PackedModel):
            yield from module.layers()
    yield from (child for child in model.children() if child is not model.model)


class Given:
    """The weights of the main process, of which the model is left empty."""

    def __init__(self, model: nn.Module):
        is_main = is_main_process()
        self.weights = dict(model.state_dict()) if is_main else {}
        # Some are not in a state dict, such as the frequencies of rotary positions.
        buffers = model.named_buffers(remove_duplicate=False)
        self.buffers = [{name: buffer.cpu() for name, buffer in buffers} if is_main else None]
        empty(model)

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
                    module._buffers[buffer] = cast(dict, self.buffers[0])[f"{name}.{buffer}".lstrip(".")].to(device)


def empty(model: nn.Module) -> None:
    """Moves a model to the meta device. Weights that are tied stay so, which `Module.to` would part."""
    moved: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                on_meta = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
                module._parameters[name] = moved.setdefault(parameter, on_meta)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device="meta")


def in_step(rows: Sequence[Row], spare: Row) -> list[tuple[Row, bool]]:
    """As many rows as the process with most of them has: `spare`, where there are fewer. And whether each counts.

    Processes gather weights in every pass, so one that made fewer would leave the others waiting for ever.
    """
    missing = largest_over_processes(len(rows)) - len(rows)
    return [(row, True) for row in rows] + [(spare, False)] * missing


def largest_over_processes(number: int) -> int:
    if number_of_processes() == 1:
        return number
    numbers: list[int] = [0] * number_of_processes()
    dist.all_gather_object(numbers, number)
    return max(numbers)


def passes(rows: Sequence[Row], of_row: Callable[[Row], Result]) -> list[Result]:
    """What `of_row` gives for each row, one at least, with equally many passes on every process."""
    return [of_row(row) for row, _ in in_step(rows, rows[0])][: len(rows)]


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that is spread over the processes, on each of them."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
