"""Gradients in fp16 products: a scale that keeps their digits, and several tensors times a number
in one launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
# As many as an H100 holds at once, 8 on each of its 132 processors: where the number is 1 a launch
# should cost no more than to start them.
PROGRAMS = 1056
# Tensors of one launch.
MOST = 4


@triton.jit
def scale_values(values_ptr, size, scale, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        index = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + index, mask=index < size).to(tl.float32)
        tl.store(
            values_ptr + index, (values * scale).to(values_ptr.dtype.element_ty), mask=index < size
        )
        start += tl.num_programs(0) * BLOCK


@triton.jit
def scale_kernel(
    first_ptr,  # [first_size], in and out, as are the others
    second_ptr,
    third_ptr,
    fourth_ptr,
    scale_ptr,  # [] fp32
    first_size,
    second_size,
    third_size,
    fourth_size,
    BLOCK: tl.constexpr,
):
    scale = tl.load(scale_ptr)
    if scale != 1.0:
        scale_values(first_ptr, first_size, scale, BLOCK)
        scale_values(second_ptr, second_size, scale, BLOCK)
        scale_values(third_ptr, third_size, scale, BLOCK)
        scale_values(fourth_ptr, fourth_size, scale, BLOCK)


@triton.jit(do_not_specialize=["size"], do_not_specialize_on_alignment=["coefficients_ptr"])
def lowered_scale_kernel(
    coefficients_ptr,  # [size] fp32
    scale_ptr,  # [] fp32
    lowered_ptr,  # [] fp32, out: a power of two, not above the scale
    ratio_ptr,  # [] fp32, out: the lowered scale over the scale
    scaled_ptr,  # [size] fp32, out: coefficients times the lowered scale
    size,
    LARGEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    start = size * 0
    while start < size:
        index = start + tl.arange(0, BLOCK)
        largest = tl.maximum(
            largest, tl.abs(tl.load(coefficients_ptr + index, mask=index < size, other=0.0))
        )
        start += BLOCK
    # The bits of the exponent alone are the power of two below.
    power = (tl.max(largest, axis=0).to(tl.int32, bitcast=True) & 0x7F800000).to(
        tl.float32, bitcast=True
    )
    scale = tl.load(scale_ptr)
    lowered = tl.minimum(LARGEST / (2.0 * tl.maximum(power, LARGEST / (2.0 * HIGHEST))), scale)
    tl.store(lowered_ptr, lowered)
    tl.store(ratio_ptr, lowered / scale)
    start = size * 0
    while start < size:
        index = start + tl.arange(0, BLOCK)
        coefficients = tl.load(coefficients_ptr + index, mask=index < size)
        tl.store(scaled_ptr + index, coefficients * lowered, mask=index < size)
        start += BLOCK


def launch_scale(values: list[Tensor], scale: Tensor) -> None:
    """values *= scale, a 0-d tensor, each of up to MOST contiguous tensors; one launch."""
    scale = scale.float()
    absent = MOST - len(values)
    sizes = [tensor.numel() for tensor in values] + absent * [0]
    with torch.cuda.device_of(scale):
        scale_kernel[(min(triton.cdiv(max(sizes), BLOCK), PROGRAMS),)](
            *values, *absent * [scale], scale, *sizes, BLOCK=BLOCK, num_warps=WARPS
        )


def launch_lowered_scale(
    scale: Tensor, coefficients: Tensor, largest: float, highest: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The scale that brings the largest coefficient to between half of `largest` and `largest`, or
    the given one if it is lower, 0-d; its ratio to the given one; and the coefficients times it.
    One launch.

    coefficients: fp32, any shape.
    """
    coefficients = coefficients.contiguous()
    lowered, ratio, scaled = (
        torch.empty_like(scale),
        torch.empty_like(scale),
        torch.empty_like(coefficients),
    )
    sizes = {"size": coefficients.numel(), "LARGEST": largest, "HIGHEST": highest, "BLOCK": BLOCK}
    with torch.cuda.device_of(scale):
        lowered_scale_kernel[(1,)](
            coefficients, scale, lowered, ratio, scaled, **sizes, num_warps=WARPS
        )
    return lowered, ratio, scaled
