"""Values and gradients against fp64: Triton's error is bounded by that of PyTorch in the same
dtypes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fastp3o_kernels.operation import INTERPRET

Compute = Callable[..., tuple[Tensor, ...]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def results(
    compute: Compute, inputs: Sequence[Tensor], grads: Sequence[Tensor], impl: str
) -> list[Tensor]:
    """What is computed, and the gradients of all inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    outputs = compute(*leaves, impl=impl)
    incoming = [grad.to(output.dtype) for grad, output in zip(grads, outputs, strict=True)]
    return [
        *(output.detach() for output in outputs),
        *torch.autograd.grad(outputs, leaves, incoming),
    ]


def check(compute: Compute, inputs: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    exact = results(compute, [t.double() for t in inputs], [g.double() for g in grads], "eager")
    eager, triton = (results(compute, inputs, grads, impl) for impl in ("eager", "triton"))
    for value, plain, fused in zip(exact, eager, triton, strict=True):
        assert fused.dtype == plain.dtype
        assert fused.shape == plain.shape
        assert fused.isfinite().all()
        size = value.abs().max().item()
        # fp32 sums in another order; the interpreter cuts off where hardware rounds to 16 bits.
        floor = 16 * torch.finfo(torch.float32).eps + 2 * torch.finfo(fused.dtype).eps * INTERPRET
        error, allowed = (((found.double() - value).abs().max().item()) for found in (fused, plain))
        # Far below zero a gate is 0 by one formula and nearly 0 by another.
        assert error <= 2 * allowed + floor * max(size, 1e-9), (error, allowed, size)
