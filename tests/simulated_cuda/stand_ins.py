"""Operations that torch has for CUDA only, or that compute more precisely there, on values in CPU memory."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.simulated_cuda.native import library

aten = torch.ops.aten


def one_kernel(stand_in: Callable) -> Callable:
    """The function, whose results alone take memory of the device: a kernel has other values in registers."""

    @wraps(stand_in)
    def run(*args: Any, **kwargs: Any) -> Any:
        device = library().allocate_on(-1)
        try:
            result = stand_in(*args, **kwargs)
        finally:
            library().allocate_on(device)
        given = {id(value) for value in tree_leaves((args, kwargs))}
        return tree_map(
            lambda value: value.clone() if isinstance(value, Tensor) and id(value) not in given else value, result
        )

    return run


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    result = (a.float() @ b.float()).to(out_dtype)
    return result if out is None else out.copy_(result)


def sum_with_product(
    added: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    result = (beta * added.float() + alpha * (a.float() @ b.float())).to(out_dtype)
    return result if out is None else out.copy_(result)


def softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return values.float().softmax(dim) if half_to_float else aten._softmax.default(values, dim, False)


def log_softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return values.float().log_softmax(dim) if half_to_float else aten._log_softmax.default(values, dim, False)


def histogram(values: Tensor, *bins: Any) -> Tensor:
    return aten.histc.default(values.float(), *bins).to(values.dtype)


def attention_weights(
    query: Tensor, key: Tensor, scale: float | None, window: list[int], is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Of one sequence, [Lq, H, D] and [Lk, H, D], fp32: weights [H, Lq, Lk] and their logarithms' sums [H, Lq]."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    products = torch.einsum("qhd,khd->hqk", query, key) * scale
    # The last query and the last key are at the same position.
    ahead = torch.arange(len(key))[None] - torch.arange(len(query))[:, None] - (len(key) - len(query))
    left, right = window
    right = 0 if is_causal else right
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    products = products.masked_fill(hidden, -float("inf"))
    return products.softmax(-1), products.logsumexp(-1)


def sequences(bounds: Tensor) -> list[slice]:
    return [slice(first, last) for first, last in zip(bounds.tolist(), bounds.tolist()[1:], strict=False)]


def repeated(heads: Tensor, query: Tensor) -> Tensor:
    return heads.float().repeat_interleave(query.shape[1] // heads.shape[1], 1)


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """torch's `_varlen_attn`; its further arguments are not used by the project."""
    out, log_sums = torch.empty_like(query), torch.zeros(query.shape[1], query.shape[0])
    for q, k in zip(sequences(cu_queries), sequences(cu_keys), strict=True):
        keys, values = repeated(key[k], query), repeated(value[k], query)
        weights, log_sums[:, q] = attention_weights(query[q].float(), keys, scale, window_size or [-1, -1], is_causal)
        out[q] = torch.einsum("hqk,khd->qhd", weights, values).to(query.dtype)
    return out, log_sums, torch.zeros(2, dtype=torch.uint64)


def varlen_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for q, k in zip(sequences(cu_queries), sequences(cu_keys), strict=True):
        with torch.enable_grad():
            queries, keys, values = (t.detach().float().requires_grad_() for t in (query[q], key[k], value[k]))
            wide = repeated(keys, query)
            weights, _ = attention_weights(queries, wide, scale, window_size or [-1, -1], is_causal)
            result = torch.einsum("hqk,khd->qhd", weights, repeated(values, query))
        found = torch.autograd.grad(result, (queries, keys, values), grad[q].float())
        for target, where, gradient in zip(grads, (q, k, k), found, strict=True):
            target[where] = gradient.to(target.dtype)
    return grads


STAND_INS: dict[str, Callable] = {
    name: one_kernel(stand_in)
    for name, stand_in in {
        "aten._log_softmax.default": log_softmax,
        "aten._softmax.default": softmax,
        "aten.addmm.dtype": sum_with_product,
        "aten.addmm.dtype_out": sum_with_product,
        "aten.histc.default": histogram,
        "aten.mm.dtype": product,
        "aten.mm.dtype_out": product,
        "torch_attn._varlen_attn.default": varlen_attention,
        "torch_attn._varlen_attn_backward.default": varlen_attention_backward,
    }.items()
}

# torch has it in pieces for devices without a kernel of their own, and these would keep more.
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
    kernels_of_cuda = torch.library.Library("aten", "IMPL", "CUDA")
    kernels_of_cuda.impl("silu_backward", aten.silu_backward.default)
