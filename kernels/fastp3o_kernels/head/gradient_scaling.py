"""Gradients that a forward pass computed, times the incoming gradient of a loss."""

import torch
from torch import Tensor

from fastp3o_kernels.dispatch import HAS_TRITON

if HAS_TRITON:
    from fastp3o_kernels.head.scale_kernel import launch_scale


def scaled(values: Tensor, scale: Tensor | None, dtype: torch.dtype, *, triton: bool) -> Tensor:
    """values times a 0-d tensor (None: 1), in `dtype`; in their own memory where that is theirs. The host does not
    wait.
    """
    if scale is None:
        return values.to(dtype)
    if values.dtype != dtype:
        return torch.mul(values, scale, out=torch.empty_like(values, dtype=dtype))
    if not triton:
        # In place a half would round the number itself to half precision first.
        return values.mul_(scale) if values.dtype == scale.dtype else values.copy_(values.to(scale.dtype) * scale)
    launch_scale(values, scale)
    return values
