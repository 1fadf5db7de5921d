"""Operations that torch has for CUDA only, or that compute more precisely there, on values in CPU
memory.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
fused = torch.nn.functional.scaled_dot_product_attention


def product(a: Tensor, b: Tensor, out_dtype: torch.dtype, *, out: Tensor | None = None) -> Tensor:
    result = (a.float() @ b.float()).to(out_dtype)
    return result if out is None else out.copy_(result)


def sum_with_product(
    added: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, **options: Any
) -> Tensor:
    result = options.get("beta", 1) * added.float() + options.get("alpha", 1) * (
        a.float() @ b.float()
    )
    return options["out"].copy_(result) if "out" in options else result.to(out_dtype)


def softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return (
        values.float().softmax(dim) if half_to_float else aten._softmax.default(values, dim, False)
    )


def log_softmax(values: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return (
        values.float().log_softmax(dim)
        if half_to_float
        else aten._log_softmax.default(values, dim, False)
    )


def gradients(
    function: Callable, inputs: tuple[Tensor, ...], grad: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        result = function(*leaves, *more)
    return torch.autograd.grad(result, leaves, grad)


# ---- attention: one launch, and one for its backward pass; torch would ask the GPU which of its kernels can run


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict
) -> Tensor:
    return fused(query, key, value, mask, **options)


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *more: Any
) -> tuple[Tensor, ...]:
    return gradients(attention, (query, key, value), grad, *more)


def sequences(bounds: Tensor) -> list[slice]:
    return [slice(first, last) for first, last in pairwise(bounds.tolist())]


def packed(query, key, value, cu_queries, cu_keys, is_causal, scale, window) -> Tensor:
    """Sequences one after another, [L, H, D]; the last query and the last key are at the same
    position.
    """
    left, right = (bound if bound >= 0 else 2**40 for bound in window or (-1, -1))
    right, results = 0 if is_causal else right, []
    for q, k in zip(sequences(cu_queries), sequences(cu_keys), strict=True):
        heads = [tensor.float().transpose(0, 1)[None] for tensor in (query[q], key[k], value[k])]
        queries, keys = (torch.arange(1 - tensor.shape[2], 1) for tensor in heads[:2])
        ahead = keys - queries[:, None]
        seen = (ahead <= right) & (ahead >= -left)
        results.append(
            fused(*heads, attn_mask=seen, scale=scale, enable_gqa=True)[0].transpose(0, 1)
        )
    return torch.cat(results).to(query.dtype)


def varlen_attention(
    q, k, v, cu_q, cu_k, longest_q, longest_k, is_causal=False, scale=None, window=None, *_
) -> tuple:
    """torch's `_varlen_attn`; the sums of logarithms are for its backward pass alone, which needs
    none here.
    """
    log_sums, random_state = torch.zeros(q.shape[1], q.shape[0]), torch.zeros(2, dtype=torch.uint64)
    return packed(q, k, v, cu_q, cu_k, is_causal, scale, window), log_sums, random_state


def varlen_attention_backward(
    grad, q, k, v, out, log_sums, cu_q, cu_k, longest_q, longest_k, *more
) -> tuple:
    is_causal, _, scale, window = (*more, None, None)[:4]
    return gradients(packed, (q, k, v), grad, cu_q, cu_k, is_causal, scale, window)


def rms_norm_backward(grad, x, shape, scale, weight, wanted) -> tuple:
    """Of torch's fused norm, over the last dimensions. scale: 1 / sqrt(mean x² + eps)."""
    dims = [*range(-len(shape), 0)]
    normed, inner = x.float() * scale, grad.float() * (1.0 if weight is None else weight.float())
    dx = scale * (inner - normed * (inner * normed).mean(dims, keepdim=True))
    dweight = (grad.float() * normed).sum([*range(x.dim() - len(shape))])
    return dx.to(x.dtype) if wanted[0] else None, dweight.to(x.dtype) if wanted[1] else None


STAND_INS: dict[str, Callable] = {
    "aten._fused_rms_norm_backward.default": rms_norm_backward,
    "aten._log_softmax.default": log_softmax,
    "aten._softmax.default": softmax,
    "aten.addmm.dtype": sum_with_product,
    "aten.addmm.dtype_out": sum_with_product,
    "aten.mm.dtype": product,
    "aten.mm.dtype_out": product,
    "torch_attn._varlen_attn.default": varlen_attention,
    "torch_attn._varlen_attn_backward.default": varlen_attention_backward,
}

# torch has it in pieces for devices without a kernel of their own.
if not torch._C._dispatch_has_kernel_for_dispatch_key("aten::silu_backward", "CUDA"):
    kernels_of_cuda = torch.library.Library("aten", "IMPL", "CUDA")
    kernels_of_cuda.impl("silu_backward", aten.silu_backward.default)
