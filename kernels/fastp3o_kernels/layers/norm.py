"""RMSNorm (arXiv 1910.07467), alone and with a sum of the residual stream, in one kernel each way.

A block of a transformer normalizes the stream, computes a branch from it and adds that branch to
the stream. The stream may be finer than all else: it is read, added to and written in its dtype,
and normalized rows in theirs.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_floating, check_same_device
from fastp3o_kernels.operation import HAS_TRITON, first_derivatives_only, use_triton
from fastp3o_kernels.rows.eager import at_least_fp32

if HAS_TRITON:
    from fastp3o_kernels.layers.norm_kernel import (
        LONGEST,
        launch_rms_norm,
        launch_rms_norm_gradient,
        row_groups,
    )


# --- autograd -------------------------------------------------------------------------------------


class NormKind(NamedTuple):
    """x / sqrt(mean x² + eps) * (offset + weight), in fp32.

    offset: 0 in most families, 1 in Gemma's. rounds: whether the normalized rows are rounded to the
    dtype of x before they meet the weight, as Llama's are and Gemma's are not.
    """

    eps: float
    offset: float = 0.0
    rounds: bool = True


class Norm(torch.autograd.Function):
    """One launch forward; two backward, one where the weight does not train."""

    @staticmethod
    def forward(ctx, x, weight, residual, kind, dtype):
        result = torch.empty_like(x, dtype=dtype)
        rounds = kind.rounds and residual is None
        launch_rms_norm(
            x, weight, result, kind.eps, offset=kind.offset, rounds=rounds, residual=residual
        )
        ctx.save_for_backward(x, weight)
        ctx.kind = kind._replace(rounds=rounds)
        return result

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad):
        # once: a layer that is computed again has them for one reading.
        x, weight = ctx.saved_tensors
        x = in_rows(x)
        dx, kind = torch.empty_like(x), ctx.kind
        dweight = launch_rms_norm_gradient(
            *(in_order_of(x, grad), x, weight, dx, kind.eps),
            offset=kind.offset,
            rounds=kind.rounds,
            trains=ctx.needs_input_grad[1],
        )
        return dx, dweight, grad if ctx.needs_input_grad[2] else None, None, None


class AddAndNorm(torch.autograd.Function):
    """The same launches. The stream's gradients, through the norm and past it, are added up in its
    kernel.
    """

    @staticmethod
    def forward(ctx, stream, branch, weight, kind, dtype):
        ctx.set_materialize_grads(False)
        total = stream if branch is None else torch.empty_like(stream)
        result = torch.empty_like(stream, dtype=dtype)
        options = {} if branch is None else {"added": branch, "total": total}
        rounds = kind.rounds and branch is None
        launch_rms_norm(
            stream, weight, result, kind.eps, offset=kind.offset, rounds=rounds, **options
        )
        ctx.save_for_backward(total, weight)
        ctx.kind = kind._replace(rounds=rounds)
        ctx.branch = None if branch is None else branch.dtype
        return total, result

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_total, grad):
        if grad is None:
            branch = None if ctx.branch is None or grad_total is None else grad_total.to(ctx.branch)
            return grad_total, branch, None, None, None
        total, weight = ctx.saved_tensors
        dtotal, kind = torch.empty_like(total), ctx.kind
        finer = ctx.branch not in (None, total.dtype)
        copy = torch.empty_like(total, dtype=ctx.branch) if finer else None
        dweight = launch_rms_norm_gradient(
            *(in_order_of(total, grad), total, weight, dtotal, kind.eps),
            offset=kind.offset,
            rounds=kind.rounds,
            grad_x=None if grad_total is None else in_order_of(total, grad_total),
            copy=copy,
            trains=ctx.needs_input_grad[2],
        )
        dbranch = dtotal if copy is None else copy
        return dtotal, None if ctx.branch is None else dbranch, dweight, None, None


# --- functions ------------------------------------------------------------------------------------


def rms_norm(
    x: Tensor,
    weight: Tensor,
    kind: NormKind,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> Tensor:
    """RMSNorm over the last dimension.

    Args:
        x: [..., D] of any floating dtype and strides.
        weight: [D] of any floating dtype.
        kind: the family's arithmetic. Rows of more than 8,192 elements are PyTorch's in any case.
        dtype: of the result; None for that of x.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        [..., D].

    Raises:
        ValueError: for shapes, dtypes or devices that disagree.
    """
    check_norm(weight, x=x)
    dtype = x.dtype if dtype is None else dtype
    if runs_kernel(impl, weight, x):
        # Heads in one product with those of others stay where they are.
        rows = x if row_groups(x) is not None else x.contiguous()
        return Norm.apply(rows, weight.contiguous(), None, kind, dtype)
    return eager_norm(x, weight, kind).to(dtype)


def add_and_norm(
    stream: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    kind: NormKind,
    *,
    dtype: torch.dtype | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A branch added to the residual stream, and RMSNorm of their sum.

    Args:
        stream: [..., D] of any floating dtype.
        branch: of that shape, None for nothing to add: then the stream comes back as it is, and its
            gradients are added up in the kernel.
        weight, kind, impl: as in `rms_norm`; a sum is not rounded before the weight.
        dtype: of the normalized rows; None for the weight's.

    Returns:
        The sum, in the stream's dtype, and the normalized rows.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree.
    """
    check_norm(weight, stream=stream, **({} if branch is None else {"branch": branch}))
    dtype = weight.dtype if dtype is None else dtype
    if runs_kernel(impl, weight, stream, branch):
        rows = None if branch is None else branch.contiguous()
        return AddAndNorm.apply(stream.contiguous(), rows, weight.contiguous(), kind, dtype)
    total = stream if branch is None else (stream + branch).to(stream.dtype)
    unrounded = kind._replace(rounds=kind.rounds and branch is None)
    return total, eager_norm(total, weight, unrounded).to(dtype)


def norm_and_add(
    branch: Tensor, stream: Tensor, weight: Tensor, kind: NormKind, *, impl: str | None = None
) -> Tensor:
    """RMSNorm of a branch, added to the residual stream without a rounding in between, as behind
    Gemma's blocks.

    Args:
        branch: [..., D] of any floating dtype.
        stream: of that shape, of any floating dtype.
        weight, kind, impl: as in `rms_norm`.

    Returns:
        The sum, in the stream's dtype.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree.
    """
    check_norm(weight, branch=branch, stream=stream)
    if runs_kernel(impl, weight, stream, branch):
        return Norm.apply(
            branch.contiguous(), weight.contiguous(), stream.contiguous(), kind, stream.dtype
        )
    return (stream + eager_norm(branch, weight, kind._replace(rounds=False))).to(stream.dtype)


# --- which implementation, and checks -------------------------------------------------------------


def runs_kernel(impl: str | None, weight: Tensor, x: Tensor, other: Tensor | None = None) -> bool:
    """Whether Triton normalizes these rows. Longer ones, which no registers hold, are PyTorch's."""
    return use_triton(impl, x, weight, other) and x.numel() > 0 and len(weight) <= LONGEST


def eager_norm(x: Tensor, weight: Tensor, kind: NormKind) -> Tensor:
    """Of fp32 at least."""
    precise = at_least_fp32(x)
    normed = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + kind.eps)
    if kind.rounds:
        normed = at_least_fp32(normed.to(x.dtype))
    return normed * (at_least_fp32(weight) + kind.offset if kind.offset else at_least_fp32(weight))


def check_norm(weight: Tensor, **rows: Tensor) -> None:
    check_floating("weight", weight)
    first, shape = next((name, tensor.shape) for name, tensor in rows.items())
    for name, tensor in rows.items():
        check_floating(name, tensor)
        if tensor.shape != shape:
            raise ValueError(
                f"{name} must have the shape of {first}, {list(shape)}, got {list(tensor.shape)}"
            )
    if weight.dim() != 1 or shape[-1:] != weight.shape:
        raise ValueError(f"weight must have shape {list(shape[-1:])}, got {list(weight.shape)}")
    check_same_device(weight=weight, **rows)


def in_rows(x: Tensor) -> Tensor:
    """x where its memory is rows one after another, in any order of the other dimensions; else a
    copy that is.
    """
    order = sorted(range(x.dim()), key=lambda i: x.stride(i), reverse=True)
    dense = x.dim() == 0 or (x.stride(-1) == 1 and x.permute(order).is_contiguous())
    return x if dense else x.contiguous()


def in_order_of(x: Tensor, other: Tensor) -> Tensor:
    """A tensor of x's shape, in the order of its memory."""
    strides = zip(x.stride(), other.stride(), x.shape, strict=True)
    same = all(a == b or size == 1 for a, b, size in strides)
    return other if same else torch.empty_like(x, dtype=other.dtype).copy_(other)
