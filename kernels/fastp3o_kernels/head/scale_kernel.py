"""Gradients in fp16 products: a scale that keeps their digits, and several tensors times a number in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
# As many as an H100 holds at once, 8 on each of its 132 processors: where the number is 1 a launch should cost no more
# than to start them.
PROGRAMS = 1056
# Tensors of one launch.
MOST = 4


@triton.jit
def scale_values(values_ptr, size, scale, BLOCK: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < size:
        index = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + index, mask=index < size).to(tl.float32)
        tl.store(values_ptr + index, (values * scale).to(values_ptr.dtype.element_ty), mask=index < size)
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


@triton.jit
def largest_size(values_ptr, size, BLOCK: tl.constexpr):
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    start = size * 0
    while start < size:
        index = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, tl.abs(tl.load(values_ptr + index, mask=index < size, other=0.0)))
        start += BLOCK
    return tl.max(largest, axis=0)


@triton.jit
def store_scaled(values_ptr, scaled_ptr, size, scale, BLOCK: tl.constexpr):
    start = size * 0
    while start < size:
        index = start + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + index, mask=index < size)
        tl.store(scaled_ptr + index, values * scale, mask=index < size)
        start += BLOCK


@triton.jit(do_not_specialize=["size"])
def lowered_scale_kernel(
    coefficients_ptr,  # [n] fp32
    entropy_coefficients_ptr,  # [n] fp32 where HAS_ENTROPY
    scale_ptr,  # [] fp32
    lowered_ptr,  # [] fp32, out: a power of two, not above the scale
    ratio_ptr,  # [] fp32, out: the lowered scale over the scale
    scaled_ptr,  # [n] fp32, out: coefficients times the lowered scale
    entropy_scaled_ptr,  # [n] fp32, out where HAS_ENTROPY
    size,
    LARGEST: tl.constexpr,
    HIGHEST: tl.constexpr,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    largest = largest_size(coefficients_ptr, size, BLOCK)
    if HAS_ENTROPY:
        largest = tl.maximum(largest, largest_size(entropy_coefficients_ptr, size, BLOCK))
    # The bits of the exponent alone are the power of two below.
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.load(scale_ptr)
    lowered = tl.minimum(LARGEST / (2.0 * tl.maximum(power, LARGEST / (2.0 * HIGHEST))), scale)
    tl.store(lowered_ptr, lowered)
    tl.store(ratio_ptr, lowered / scale)
    store_scaled(coefficients_ptr, scaled_ptr, size, lowered, BLOCK)
    if HAS_ENTROPY:
        store_scaled(entropy_coefficients_ptr, entropy_scaled_ptr, size, lowered, BLOCK)


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
    scale: Tensor, coefficients: list[Tensor], largest: float, highest: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """The scale that brings the largest coefficient to between half of `largest` and `largest`, or the given one if it
    is lower, 0-d; its ratio to the given one; and the coefficients times it. One launch.

    coefficients: [n] fp32 of the log-probs, and of the entropies if they count.
    """
    coefficients = [values.contiguous() for values in coefficients]
    lowered, ratio = torch.empty_like(scale), torch.empty_like(scale)
    scaled = [torch.empty_like(values) for values in coefficients]
    with torch.cuda.device_of(scale):
        lowered_scale_kernel[(1,)](
            coefficients[0],
            coefficients[-1],
            scale,
            lowered,
            ratio,
            scaled[0],
            scaled[-1],
            len(coefficients[0]),
            LARGEST=largest,
            HIGHEST=highest,
            HAS_ENTROPY=len(coefficients) == 2,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return lowered, ratio, scaled
