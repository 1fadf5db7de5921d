"""scaled_dot_product_attention on the pretended device: one launch, and one for its backward pass.

torch would ask the GPU which of its kernels can run.
"""

from typing import Any

import torch
from torch import Tensor

from tests.simulated_cuda.operations import execute
from tests.simulated_cuda.record import note_launch
from tests.simulated_cuda.stand_ins import one_kernel
from tests.simulated_cuda.tensors import is_simulated

fused = torch.nn.functional.scaled_dot_product_attention


def install() -> None:
    torch.nn.functional.scaled_dot_product_attention = attention


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    options = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if not is_simulated(query):
        return fused(query, key, value, attn_mask, dropout_p, **options)
    assert dropout_p == 0.0
    return Attention.apply(query, key, value, attn_mask, options)


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict) -> Tensor:
        out = on_its_device(forward, query, key, value, mask, options)
        # CUDA's kernels keep both for their backward pass; this one computes them again.
        log_sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, mask, out, log_sums)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        query, key, value, mask, *_ = ctx.saved_tensors
        return *on_its_device(backward, query, key, value, mask, ctx.options, grad), None, None


def on_its_device(function: Any, query: Tensor, *args: Any) -> Any:
    note_launch(f"attention {function.__name__}")
    return execute(one_kernel(function), (query, *args), {}, query.device, launched=True, written=[])


def forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict) -> Tensor:
    return fused(query, key, value, mask, **options)


def backward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict, grad: Tensor
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        result = fused(*inputs, mask, **options)
    return torch.autograd.grad(result, inputs, grad)
