"""Shares data, results and errors among the processes, and refuses values that are not finite on any of them."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fastp3o.errors import UserError
from fastp3o.files import make_unfinished, move_into_place, naming

Result = TypeVar("Result")


class NotFiniteError(UserError):
    """A reward, a loss, a gradient, a weight or an evaluation is NaN or infinite."""


@dataclass(frozen=True)
class Share:
    """A process's share of the rows that train: number `index` of `count`. copy: its place among those that have it."""

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


def on_main_process(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """Calls `compute` on the main process and returns its result on every process. An error there is raised on all, so
    that none waits for a process that has ended.
    """
    if accelerator.num_processes == 1:
        return compute()
    outcome = result_or_error(compute) if accelerator.is_main_process else (None, None)
    result, error = broadcast_object_list(list(outcome))
    if error is not None:
        raise error
    return result


def on_every_process(accelerator: Accelerator, compute: Callable[[], Result]) -> Result:
    """Returns this process's result, once all have theirs. An error on one is raised on all."""
    if accelerator.num_processes == 1:
        return compute()
    result, error = result_or_error(compute)
    errors = [error for error in gather_object([error]) if error is not None]
    if errors:
        raise error or errors[0]
    return result  # type: ignore[return-value]


def result_or_error(compute: Callable[[], Result]) -> tuple[Result | None, Exception | None]:
    try:
        return compute(), None
    except Exception as error:
        return None, error


@contextmanager
def whole_folder(accelerator: Accelerator, folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which all processes may write to. It takes its place, where it may replace
    another, once the block has ended without an error on the main process.
    """
    unfinished = on_main_process(accelerator, lambda: make_unfinished(folder))
    try:
        with naming(folder):
            yield unfinished
        on_main_process(accelerator, lambda: move_into_place(unfinished, folder))
    except BaseException:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def sum_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    return values if accelerator.num_processes == 1 else accelerator.reduce(values, reduction="sum")


def require_finite(accelerator: Accelerator, what: str, values: Tensor) -> None:
    """Raises NotFiniteError on every process if any of them holds a value that is not finite."""
    if count := int(not_finite(accelerator, values)):
        raise not_finite_error(what, count)


def not_finite(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The number of values that are not finite on all processes, 0-d int64."""
    bad = (~torch.isfinite(values)).sum()
    return sum_over_processes(accelerator, bad if accelerator.num_processes == 1 else bad.to(accelerator.device))


def not_finite_error(what: str, count: int) -> NotFiniteError:
    return NotFiniteError(f"{what} is NaN or infinite ({count} value{'s' if count > 1 else ''})")


def require_all_finite(accelerator: Accelerator, what: str, tensors: Iterable[Tensor]) -> None:
    """`require_finite` for many tensors, in one pass that takes no memory. Each process reads its own shards."""
    require_finite(accelerator, what, largest(accelerator, tensors))


@torch.no_grad()
def largest(accelerator: Accelerator, tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value of each tensor of floats, or of this process's part; NaN where one is."""
    local = (local_part(tensor) for tensor in tensors if tensor.is_floating_point())
    parts = [part.to(accelerator.device) for part in local if part.numel()]
    return torch.stack(torch._foreach_norm(parts, float("inf"))) if parts else torch.zeros(1, device=accelerator.device)


def copies(tensor: Tensor) -> int:
    """The number of processes that hold the part of a tensor that this one does."""
    if not isinstance(tensor, DTensor):
        return 1
    placed = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return dist.get_world_size() // prod(size for size, placement in placed if not placement.is_replicate())


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
