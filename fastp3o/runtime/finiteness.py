"""Refuses values that are not finite on any process."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.runtime.processes import sum_over_processes
from fastp3o.runtime.shares import local_part


class NotFiniteError(UserError):
    """A reward, a loss, a gradient, a weight or an evaluation is NaN or infinite."""


def require_finite(accelerator: Accelerator, what: str, values: Tensor) -> None:
    """Raises NotFiniteError on every process if any of them holds a value that is not finite."""
    if count := int(not_finite(accelerator, values)):
        raise not_finite_error(what, count)


def not_finite(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The number of values that are not finite on all processes, 0-d int64."""
    bad = (~torch.isfinite(values)).sum()
    return sum_over_processes(
        accelerator, bad if accelerator.num_processes == 1 else bad.to(accelerator.device)
    )


def not_finite_error(what: str, count: int) -> NotFiniteError:
    return NotFiniteError(f"{what} is NaN or infinite ({count} value{'s' if count > 1 else ''})")


def require_all_finite(accelerator: Accelerator, what: str, tensors: Iterable[Tensor]) -> None:
    """`require_finite` for many tensors, in one pass that takes no memory. Each process reads its
    own shards.
    """
    require_finite(accelerator, what, largest(accelerator, tensors))


@torch.no_grad()
def largest(accelerator: Accelerator, tensors: Iterable[Tensor]) -> Tensor:
    """The largest absolute value of each tensor of floats, or of this process's part; NaN where one
    is.
    """
    local = (local_part(tensor) for tensor in tensors if tensor.is_floating_point())
    parts = [part.to(accelerator.device) for part in local if part.numel()]
    return (
        torch.stack(torch._foreach_norm(parts, float("inf")))
        if parts
        else torch.zeros(1, device=accelerator.device)
    )
