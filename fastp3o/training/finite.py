"""Stopping at values that are not finite."""

import torch
from accelerate import Accelerator
from torch import Tensor


class NotFiniteError(RuntimeError):
    """A reward, a loss or a gradient is NaN or infinite."""


def require_finite(accelerator: Accelerator, what: str, values: Tensor) -> None:
    """Raises NotFiniteError on every process when any of them holds a value that is not finite."""
    bad = (~torch.isfinite(values)).sum().to(accelerator.device)
    count = int(accelerator.reduce(bad, reduction="sum"))
    if count:
        raise NotFiniteError(f"{what} is NaN or infinite ({count} value{'s' if count > 1 else ''})")
