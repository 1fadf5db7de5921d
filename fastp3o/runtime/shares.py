"""The share of the work, and the part of a sharded tensor, that this process has."""

from dataclasses import dataclass
from math import prod
from typing import Any

import torch.distributed as dist
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Share:
    """A process's share of the rows that train: number `index` of `count`. copy: its place among
    those that have it.
    """

    index: int = 0
    count: int = 1
    copy: int = 0

    @classmethod
    def of(cls, mesh: DeviceMesh | None) -> "Share":
        if mesh is None:
            return cls()
        cut_over = mesh["tensor"].size() if "tensor" in (mesh.mesh_dim_names or ()) else 1
        return cls(mesh.get_rank() // cut_over, mesh.size() // cut_over, mesh.get_rank() % cut_over)

    def numbers(self, total: int) -> list[int]:
        """The share's numbers of so many examples: every n-th."""
        return list(range(total))[self.index :: self.count]

    def gather(self, values: list[Any]) -> list[Any]:
        """The values of all shares, in their order, each once."""
        return gather_object(values if self.copy == 0 else [])


def copies(tensor: Tensor) -> int:
    """The number of processes that hold the part of a tensor that this one does."""
    if not isinstance(tensor, DTensor):
        return 1
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return dist.get_world_size() // prod(
        size for size, placement in placed if not placement.is_replicate()
    )


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
