"""Stopping at values that are not finite."""

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed.tensor import DTensor


class NotFiniteError(RuntimeError):
    """A reward, a loss, a gradient, a weight or an evaluation is NaN or infinite."""


def require_finite(accelerator: Accelerator, what: str, values: Tensor) -> None:
    """Raises NotFiniteError on every process when any of them holds a value that is not finite."""
    bad = (~torch.isfinite(values)).sum().to(accelerator.device)
    count = int(accelerator.reduce(bad, reduction="sum"))
    if count:
        raise NotFiniteError(f"{what} is NaN or infinite ({count} value{'s' if count > 1 else ''})")


@torch.no_grad()
def require_all_finite(accelerator: Accelerator, what: str, tensors: Iterable[Tensor]) -> None:
    """The same for many tensors, in one pass that takes no memory; of a sharded tensor each process reads its part."""
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    parts = [part.to(accelerator.device) for part in parts if part.numel()]
    require_finite(
        accelerator, what, torch.stack(torch._foreach_norm(parts, float("inf"))) if parts else torch.zeros(1)
    )
