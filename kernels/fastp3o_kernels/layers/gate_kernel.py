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


@triton.jit(do_not_specialize=["size"])
def gate_kernel(
    gate_ptr,  # [size]
    up_ptr,  # [size]
    result_ptr,  # [size], out
    size,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < size
    gate = tl.load(gate_ptr + index, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=inside, other=0.0).to(tl.float32)
    active, _ = activated(gate, ACTIVATION)
    active = active.to(gate_ptr.dtype.element_ty).to(tl.float32)
    tl.store(result_ptr + index, (active * up).to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
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


def launch_gate(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Contiguous tensors of one shape and dtype; one launch."""
    result = torch.empty_like(gate)
    with torch.cuda.device_of(gate):
        gate_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            gate, up, result, gate.numel(), ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS
        )
    return result


def launch_gate_gradient(grad: Tensor, gate: Tensor, up: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    with torch.cuda.device_of(gate):
        gate_gradient_kernel[(triton.cdiv(gate.numel(), BLOCK),)](
            grad, gate, up, dgate, dup, gate.numel(), ACTIVATION=activation, BLOCK=BLOCK, num_warps=WARPS
        )
    return dgate, dup
