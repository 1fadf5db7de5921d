"""Gradients that a forward pass computed, times the incoming gradient: no pass over memory where that is 1."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8


@triton.jit
def scale_kernel(
    values_ptr,  # [size], in and out
    factor_ptr,  # [] fp32
    size,
    BLOCK: tl.constexpr,
):
    factor = tl.load(factor_ptr)
    if factor != 1.0:
        index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + index, mask=index < size).to(tl.float32)
        tl.store(values_ptr + index, (values * factor).to(values_ptr.dtype.element_ty), mask=index < size)


def scaled(values: Tensor, factor: Tensor, dtype: torch.dtype, *, triton_kernels: bool) -> Tensor:
    """values times factor, a 0-d tensor, in `dtype`; in their place where that is theirs. The host does not wait."""
    if values.dtype != dtype:
        return torch.mul(values, factor, out=torch.empty_like(values, dtype=dtype))
    if not triton_kernels:
        return values.mul_(factor)
    with torch.cuda.device_of(values):
        scale_kernel[(triton.cdiv(values.numel(), BLOCK),)](
            values, factor.float(), values.numel(), BLOCK=BLOCK, num_warps=WARPS
        )
    return values
