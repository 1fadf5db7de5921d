"""RMSNorm of rows, with a sum of two tensors before or behind it, and its gradient.

D elements of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a tile at least: several short rows, as of a head each, are one program's.
TILE = 2048
# Elements of a row at most: a gradient's program has four tiles of them in registers.
LONGEST = 8192
# Of the gradient's programs, each of which sums the weight's gradient over its rows: two on each of
# an H100's 132 processors.
PROGRAMS = 264
# Columns and programs of a tile of the kernel that adds up their sums.
BLOCK_C, BLOCK_P = 64, 32
WARPS = 4
PROCESSOR_REGISTERS = 65536
# Registers of a thread at most, but for the gradient: a processor has 1,024 threads at least.
REGISTERS = 64
# Bytes of a row of which a processor holds two programs of the gradient.
SHARING_BYTES = 8192


@triton.jit
def scaled_weight(weight_ptr, d, inside, OFFSET: tl.constexpr):
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return weight if OFFSET == 0.0 else weight + OFFSET


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x_ptr,  # [rows, D]
    added_ptr,  # [rows, D], or None: the rows to normalise are x + added
    sum_ptr,  # [rows, D], out, or None: that sum
    weight_ptr,  # [D]
    residual_ptr,  # [rows, D], or None: added to the result
    result_ptr,  # [rows, D], out
    rows,
    eps,
    x_group_stride,  # elements from one group of rows of x to the next; None: all of its rows lie one after another
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,  # whether normalised rows are rounded to the dtype of x before the weight
    GROUP: tl.constexpr,  # rows of such a group, which lie one after another
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (row < rows) & (d < D)
    at = row * D + d
    x_at = at
    if x_group_stride is not None:
        x_at = row // GROUP * x_group_stride + row % GROUP * D + d
    x = tl.load(x_ptr + x_at, mask=inside, other=0.0).to(tl.float32)
    if added_ptr is not None:
        total = (x + tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(
            sum_ptr.dtype.element_ty
        )
        tl.store(sum_ptr + at, total, mask=inside)
        x = total.to(tl.float32)
    normed = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps))[:, None]
    if ROUNDS:
        normed = normed.to(x_ptr.dtype.element_ty).to(tl.float32)
    result = normed * scaled_weight(weight_ptr, d, d < D, OFFSET)
    if residual_ptr is not None:
        result += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result_ptr + at, result.to(result_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_gradient_kernel(
    grad_ptr,  # [rows, D]: of the result
    x_ptr,  # [rows, D]: what was normalised
    weight_ptr,  # [D]
    grad_x_ptr,  # [rows, D], or None: a further gradient of x
    dx_ptr,  # [rows, D], out
    copy_ptr,  # [rows, D], out, or None: dx in another dtype
    dweight_ptr,  # [programs, D] fp32, out, or None: each program's sum
    rows,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    OFFSET: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)[None, :]
    weight = scaled_weight(weight_ptr, d, d < D, OFFSET)
    dweight = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK_R
    while first < rows:
        row = first + tl.arange(0, BLOCK_R)[:, None]
        inside = (row < rows) & (d < D)
        at = row * D + d
        x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
        scale = (1.0 / tl.sqrt(tl.sum(x * x, axis=1) / D + eps))[:, None]
        normed = x * scale
        if dweight_ptr is not None:
            if ROUNDS:
                dweight += grad * normed.to(x_ptr.dtype.element_ty).to(tl.float32)
            else:
                dweight += grad * normed
        grad *= weight
        dx = scale * (grad - normed * (tl.sum(grad * normed, axis=1) / D)[:, None])
        if grad_x_ptr is not None:
            dx += tl.load(grad_x_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if copy_ptr is not None:
            tl.store(copy_ptr + at, dx.to(copy_ptr.dtype.element_ty), mask=inside)
        first += tl.num_programs(0) * BLOCK_R
    if dweight_ptr is not None:
        column = tl.arange(0, BLOCK_D)
        tl.store(
            dweight_ptr + tl.program_id(0) * D + column, tl.sum(dweight, axis=0), mask=column < D
        )


@triton.jit(do_not_specialize=["programs"])
def weight_gradient_kernel(
    parts_ptr,  # [programs, D] fp32
    dweight_ptr,  # [D], out
    programs,
    D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    sums = tl.zeros([BLOCK_P, BLOCK_C], dtype=tl.float32)
    first = programs * 0
    while first < programs:
        p = first + tl.arange(0, BLOCK_P)[:, None]
        sums += tl.load(parts_ptr + p * D + c, mask=(p < programs) & (c < D), other=0.0)
        first += BLOCK_P
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    tl.store(dweight_ptr + c, tl.sum(sums, axis=0).to(dweight_ptr.dtype.element_ty), mask=c < D)


def tile(D: int) -> dict[str, int]:
    """Sizes of a program's tile."""
    block = triton.next_power_of_2(D)
    return {"D": D, "BLOCK_D": block, "BLOCK_R": max(1, TILE // block)}


def warps(D: int) -> int:
    """16 elements a thread at most."""
    return max(WARPS, triton.next_power_of_2(D) // 512)


def gradient_warps(D: int) -> int:
    """Of the longest rows 32 elements a thread."""
    return min(8, warps(D))


def gradient_registers(D: int, element_bytes: int) -> int:
    """Of a thread at most: two programs share those of a processor, and of longer rows one has all.
    Without a limit ptxas aims at more programs than there are, and spills. element_bytes: of the
    weight.
    """
    programs = 2 if D * element_bytes <= SHARING_BYTES else 1
    return min(255, PROCESSOR_REGISTERS // (32 * gradient_warps(D) * programs))


def row_groups(x: Tensor) -> tuple[int, int] | None:
    """How many rows of the last dimension lie one after another, in the order of memory, and the
    elements from one group of them to the next; None where groups have no one distance, or where
    memory overlaps or a row has gaps.
    """
    if x.stride(-1) != 1:
        return None
    group, groups, distance = 1, 1, x.numel()
    for stride, size in sorted(zip(x.stride()[:-1], x.shape[:-1], strict=True)):
        if size == 1:
            continue
        if groups == 1 and stride == group * x.shape[-1]:
            group *= size
        elif groups == 1 and stride > group * x.shape[-1]:
            groups, distance = size, stride
        elif groups > 1 and stride == groups * distance:
            groups *= size
        else:
            return None
    return group, distance


def launch_rms_norm(
    x: Tensor,
    weight: Tensor,
    result: Tensor,
    eps: float,
    *,
    offset: float,
    rounds: bool,
    added: Tensor | None = None,
    total: Tensor | None = None,
    residual: Tensor | None = None,
) -> None:
    """Writes `result`, and `total` where something is added. One launch. All but the weight are of
    one shape and one order of memory, in which rows lie one after another; those of x in groups
    where nothing is added.
    """
    sizes = tile(len(weight))
    rows = x.numel() // len(weight)
    group, stride = row_groups(x) or (rows, 0)
    together = group == rows
    with torch.cuda.device_of(x):
        rms_norm_kernel[(triton.cdiv(rows, sizes["BLOCK_R"]),)](
            *(x, added, total, weight, residual, result, rows, eps),
            x_group_stride=None if together else stride,
            **sizes,
            OFFSET=offset,
            ROUNDS=rounds,
            GROUP=None if together else group,
            num_warps=warps(len(weight)),
            maxnreg=REGISTERS,
        )


def launch_rms_norm_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    dx: Tensor,
    eps: float,
    *,
    offset: float,
    rounds: bool,
    grad_x: Tensor | None = None,
    copy: Tensor | None = None,
    trains: bool = True,
) -> Tensor | None:
    """Writes `dx`, and `copy`, the same in another dtype. Returns the weight's gradient if it
    trains. Tensors as above. One launch, two with the weight's gradient.
    """
    D = len(weight)
    sizes = tile(D)
    rows = x.numel() // D
    programs = min(PROGRAMS, triton.cdiv(rows, sizes["BLOCK_R"]))
    parts = torch.empty(programs, D, dtype=torch.float32, device=x.device) if trains else None
    with torch.cuda.device_of(x):
        rms_norm_gradient_kernel[(programs,)](
            *(grad, x, weight, grad_x, dx, copy, parts, rows, eps),
            **sizes,
            OFFSET=offset,
            ROUNDS=rounds,
            num_warps=gradient_warps(D),
            maxnreg=gradient_registers(D, weight.element_size()),
        )
        if parts is None:
            return None
        dweight = torch.empty_like(weight)
        weight_gradient_kernel[(triton.cdiv(D, BLOCK_C),)](
            *(parts, dweight, programs),
            D=D,
            BLOCK_C=BLOCK_C,
            BLOCK_P=BLOCK_P,
            num_warps=WARPS,
            maxnreg=REGISTERS,
        )
        return dweight
