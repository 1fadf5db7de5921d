"""An activation of one tensor times another, and both gradients."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastp3o_kernels.rows.logits_kernel import LOG2E, exp2, reciprocal, tanh_and_slope

BLOCK = 4096
WARPS = 8
# Of GELU's approximation by tanh (arXiv 1606.08415), √(2/π) and the cube's factor.
TANH_SCALE = tl.constexpr(0.7978845608028654)
CUBE = tl.constexpr(0.044715)
# 1/√2 and 1/√(2π), of GELU itself.
ROOT_HALF = tl.constexpr(0.7071067811865476)
DENSITY = tl.constexpr(0.3989422804014327)


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """The activation of x in fp32, and its slope."""
    if ACTIVATION == "silu":
        share = reciprocal(1.0 + exp2(-x * LOG2E))
        slope = share * (1.0 + x * (1.0 - share))
    elif ACTIVATION == "gelu_tanh":
        tanh, tanh_slope = tanh_and_slope((x + x * x * x * CUBE) * TANH_SCALE)
        share = 0.5 + 0.5 * tanh
        slope = share + x * tanh_slope * (0.5 * TANH_SCALE) * (1.0 + x * x * (3.0 * CUBE))
    else:
        tl.static_assert(ACTIVATION == "gelu")
        share = 0.5 + 0.5 * tl.erf(x * ROOT_HALF)
        slope = share + x * DENSITY * exp2(x * x * (-0.5 * LOG2E))
    return x * share, slope


@triton.jit
def gate_kernel(
    gate_ptr,  # [rows, size], rows at any stride
    up_ptr,  # the same
    result_ptr,  # [rows, size], out
    size,
    gate_row_stride,
    up_row_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    blocks = tl.cdiv(size, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    index = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    gate = tl.load(gate_ptr + row * gate_row_stride + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_row_stride + index, mask=inside, other=0.0).to(tl.float32)
    active, _ = activated(gate, ACTIVATION)
    active = active.to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        result_ptr + row * size + index, (active * up).to(result_ptr.dtype.element_ty), mask=inside
    )


@triton.jit
def gate_gradient_kernel(
    grad_ptr,  # [size]: of the result
    gate_ptr,  # [size]
    up_ptr,  # [size]
    dgate_ptr,  # [size], out
    dup_ptr,  # [size], out
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    grad = tl.load(grad_ptr + index, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    active, slope = activated(gate, ACTIVATION)
    active = active.to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(dup_ptr + index, (grad * active).to(dup_ptr.dtype.element_ty), mask=inside)
    tl.store(dgate_ptr + index, (grad * up * slope).to(dgate_ptr.dtype.element_ty), mask=inside)


def row_stride(x: Tensor) -> int | None:
    """Elements from one row of the last dimension to the next; None where it differs, or a row has
    gaps.
    """
    if x.is_contiguous():
        return x.shape[-1] if x.dim() else 1
    if x.stride(-1) != 1:
        return None
    try:
        return x.view(-1, x.shape[-1]).stride(0)
    except RuntimeError:  # torch knows no one stride
        return None


def launch_gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Tensors of one shape and dtype, whose rows have one stride; one launch. Returns a contiguous
    one.
    """
    result = torch.empty_like(gate, memory_format=torch.contiguous_format)
    # All of contiguous tensors is one row.
    together = gate.is_contiguous() and up.is_contiguous()
    size = gate.numel() if together else gate.shape[-1]
    strides = (0, 0) if together else (row_stride(gate), row_stride(up))
    count = gate.numel() // size
    with torch.cuda.device_of(gate):
        gate_kernel[(count * triton.cdiv(size, BLOCK),)](
            gate, up, result, size, *strides, ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS
        )
    return result


def launch_gate_gradient(
    grad: Tensor, gate: Tensor, up: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        gate_gradient_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            grad,
            gate,
            up,
            dgate,
            dup,
            gate.numel(),
            ACTIVATION=activation,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return dgate, dup
