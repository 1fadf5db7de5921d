"""A model that does not train: the reference, or a reward model."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.sharding import passes, shard
from fastp3o.packing.packed_row import PackedRow


class FrozenModel:
    """Spread over a mesh of processes, or whole. With `offload` it, or its parts, are on the CPU between uses."""

    def __init__(self, model: PackedModel, device: torch.device, mesh: DeviceMesh | None, *, offload: bool):
        self.model, self.device = model.eval().requires_grad_(False), device
        self.moves = offload and mesh is None
        if self.moves:
            model.to("cpu")
        else:
            shard(model, device, mesh, offload=offload)

    @torch.no_grad()
    def passes(self, rows: Sequence[PackedRow], of_row: Callable[[PackedModel, PackedRow], Tensor]) -> list[Tensor]:
        """What `of_row` makes of the model and each row, on the device."""
        with on_device(self.model, self.device) if self.moves else nullcontext():
            return passes(rows, partial(of_row, self.model))


@contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """For the time of a block; on the CPU afterwards."""
    model.to(device)
    try:
        yield
    finally:
        model.to("cpu")
