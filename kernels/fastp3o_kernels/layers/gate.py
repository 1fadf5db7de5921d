"""The gate of a feed-forward layer: an activation of one product times another product (arXiv
2002.05202).
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fastp3o_kernels.checks import check_floating, check_same_device, check_shape
from fastp3o_kernels.operation import HAS_TRITON, first_derivatives_only, use_triton

if HAS_TRITON:
    from fastp3o_kernels.layers.gate_kernel import launch_gate, launch_gate_gradient, row_stride

# SwiGLU's, and GeGLU's in two ways.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


class Gate(torch.autograd.Function):
    """One launch forward, one backward. The activation is computed again, and not kept."""

    @staticmethod
    def forward(ctx, gate, up, activation):
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return launch_gate(gate, up, activation)

    @staticmethod
    @first_derivatives_only
    def backward(ctx, grad):
        gate, up = (tensor.contiguous() for tensor in ctx.saved_tensors)
        return *launch_gate_gradient(grad.contiguous(), gate, up, ctx.activation), None


def gated(gate: Tensor, up: Tensor, activation: str, *, impl: str | None = None) -> Tensor:
    """activation(gate) * up, where the activation is rounded to the dtype before it is multiplied.

    Args:
        gate: [...] of any floating dtype and strides.
        up: of the same shape and dtype.
        activation: one of ACTIVATIONS.
        impl: None, "triton" or "eager", as in `token_logprobs`.

    Raises:
        ValueError: for shapes, dtypes or devices that disagree, and for another activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    check_floating("gate", gate)
    check_shape("up", up, tuple(gate.shape), "that of the gate")
    if up.dtype != gate.dtype:
        raise ValueError(f"up must have the gate's dtype, {gate.dtype}, got {up.dtype}")
    check_same_device(gate=gate, up=up)
    if use_triton(impl, gate, up) and gate.numel():
        # Views of one product of both stay where they are.
        if row_stride(gate) is None or row_stride(up) is None:
            gate, up = gate.contiguous(), up.contiguous()
        return Gate.apply(gate, up, activation)
    return ACTIVATIONS[activation](gate) * up
