"""Rotary positions (arXiv 2104.09864): pairs of a head's elements turned by angles that grow with
the position.
"""

import torch
from torch import Tensor

from fastp3o_kernels.checks import check_floating, check_same_device, check_shape
from fastp3o_kernels.operation import HAS_TRITON, first_derivatives_only, use_triton
from fastp3o_kernels.rows.eager import at_least_fp32

if HAS_TRITON:
    from fastp3o_kernels.layers.rotary_kernel import launch_rotary


class Rotary(torch.autograd.Function):
    """One launch forward, one backward."""

    @staticmethod
    def forward(ctx, query, key, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return launch_rotary(query, key, cos, sin, interleaved=interleaved, back=False)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad_query, grad_key):
        grads = with_whole_heads(grad_query), with_whole_heads(grad_key)
        return (
            *launch_rotary(*grads, *ctx.saved_tensors, interleaved=ctx.interleaved, back=True),
            None,
            None,
            None,
        )


def rotate(
    query: Tensor,
    key: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    impl: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Turns queries and keys, in fp32 with one rounding at the end. Angles get no gradient.

    Args:
        query: [T, H, D] of any floating dtype and strides.
        key: [T, Hkv, D] of that dtype.
        cos, sin: [T, R] of any floating dtype, of an angle for each element, with R even and at
            most D; elements from R on stay as they are.
        interleaved: whether neighbors turn together; else the two that are R/2 apart.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Returns:
        [T, H, D] and [T, Hkv, D].

    Raises:
        ValueError: for shapes, dtypes or devices that disagree.
    """
    for name, tensor in {"query": query, "key": key, "cos": cos, "sin": sin}.items():
        check_floating(name, tensor)
    T, _, D = query.shape
    R = cos.shape[-1]
    check_shape("key", key, (T, key.shape[1], D), "tokens and heads of the queries' sizes")
    check_shape("cos", cos, (T, R), "angles for each token")
    check_shape("sin", sin, (T, R), "those of cos")
    if R % 2 or R > D:
        raise ValueError(f"cos must have an even number of columns, {D} at most, got {R}")
    if query.dtype != key.dtype:
        raise ValueError(f"key must have the queries' dtype, {query.dtype}, got {key.dtype}")
    check_same_device(query=query, key=key, cos=cos, sin=sin)
    if use_triton(impl, query, key, cos, sin) and query.numel():
        heads = with_whole_heads(query), with_whole_heads(key)
        return Rotary.apply(*heads, cos.contiguous(), sin.contiguous(), interleaved)
    angles = at_least_fp32(cos)[:, None], at_least_fp32(sin)[:, None]
    return turned(query, *angles, interleaved), turned(key, *angles, interleaved)


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    R = cos.shape[-1]
    precise = at_least_fp32(x)
    turning, rest = precise[..., :R], precise[..., R:]
    # Pairs (a, b) turn: they lie side by side, or half of the turning part apart.
    if interleaved:
        a, b = turning[..., 0::2], turning[..., 1::2]
        other = torch.stack([-b, a], -1).flatten(-2)
    else:
        a, b = turning.chunk(2, -1)
        other = torch.cat([-b, a], -1)
    return torch.cat([turning * cos + other * sin, rest], -1).to(x.dtype)


def with_whole_heads(x: Tensor) -> Tensor:
    return x if x.stride(2) == 1 else x.contiguous()
