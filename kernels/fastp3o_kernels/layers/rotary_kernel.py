"""Queries and keys turned by their positions, and turned back for the gradient.

T tokens, H heads of queries and Hkv of keys, D the size of a head, R of its elements turn.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARPS = 4


@triton.jit
def turn_heads(
    x_ptr,
    result_ptr,
    token,
    token_stride,
    head_stride,
    cos_ptr,
    sin_ptr,
    HEADS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):
    """One token's heads. Elements turn in pairs: neighbours if INTERLEAVED, else half of R apart."""
    head = tl.arange(0, BLOCK_H)[:, None]
    pair = tl.arange(0, BLOCK_PAIR)[None, :]
    first = 2 * pair if INTERLEAVED else pair
    second = first + 1 if INTERLEAVED else pair + R // 2
    inside = (head < HEADS) & (pair < R // 2)
    cos_first = tl.load(cos_ptr + first, mask=pair < R // 2, other=0.0).to(tl.float32)
    sin_first = tl.load(sin_ptr + first, mask=pair < R // 2, other=0.0).to(tl.float32)
    cos_second = tl.load(cos_ptr + second, mask=pair < R // 2, other=0.0).to(tl.float32)
    sin_second = tl.load(sin_ptr + second, mask=pair < R // 2, other=0.0).to(tl.float32)
    x_ptr += token * token_stride + head * head_stride
    result_ptr += (token * HEADS + head) * D
    a = tl.load(x_ptr + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        new_a = a * cos_first + b * sin_second
        new_b = b * cos_second - a * sin_first
    else:
        new_a = a * cos_first - b * sin_first
        new_b = b * cos_second + a * sin_second
    tl.store(result_ptr + first, new_a.to(result_ptr.dtype.element_ty), mask=inside)
    tl.store(result_ptr + second, new_b.to(result_ptr.dtype.element_ty), mask=inside)
    if R < D:
        rest = R + tl.arange(0, triton.next_power_of_2(D - R))[None, :]
        kept = (head < HEADS) & (rest < D)
        tl.store(result_ptr + rest, tl.load(x_ptr + rest, mask=kept), mask=kept)


@triton.jit
def rotary_kernel(
    query_ptr,  # [T, H, D], tokens and heads at any stride
    key_ptr,  # [T, Hkv, D], the same
    cos_ptr,  # [T, R]
    sin_ptr,  # [T, R]
    query_out_ptr,  # [T, H, D], out
    key_out_ptr,  # [T, Hkv, D], out
    query_token_stride,
    query_head_stride,
    key_token_stride,
    key_head_stride,
    H: tl.constexpr,
    HKV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HKV: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BLOCK_PAIR: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    cos_ptr += token * R
    sin_ptr += token * R
    turn_heads(
        *(query_ptr, query_out_ptr, token, query_token_stride, query_head_stride, cos_ptr, sin_ptr),
        *(H, BLOCK_H, D, R, BLOCK_PAIR, INTERLEAVED, BACK),
    )
    turn_heads(
        *(key_ptr, key_out_ptr, token, key_token_stride, key_head_stride, cos_ptr, sin_ptr),
        *(HKV, BLOCK_HKV, D, R, BLOCK_PAIR, INTERLEAVED, BACK),
    )


def sizes(H: int, HKV: int, D: int, R: int) -> dict[str, int]:
    blocks = {"BLOCK_H": H, "BLOCK_HKV": HKV, "BLOCK_PAIR": R // 2}
    return {"H": H, "HKV": HKV, "D": D, "R": R} | {
        n: triton.next_power_of_2(size) for n, size in blocks.items()
    }


def launch_rotary(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool, back: bool
) -> tuple[Tensor, Tensor]:
    """[T, H, D] and [T, Hkv, D], heads contiguous; [T, R] twice, contiguous -> new contiguous
    tensors. One launch.
    """
    (T, H, D), HKV = query.shape, key.shape[1]
    results = (
        torch.empty_like(query, memory_format=torch.contiguous_format),
        key.new_empty(key.shape),
    )
    strides = *query.stride()[:2], *key.stride()[:2]
    with torch.cuda.device_of(query):
        rotary_kernel[(T,)](
            *(query, key, cos, sin, *results, *strides),
            **sizes(H, HKV, D, cos.shape[1]),
            INTERLEAVED=interleaved,
            BACK=back,
            num_warps=WARPS,
        )
    return results
