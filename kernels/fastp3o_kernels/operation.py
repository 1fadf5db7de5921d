"""Parts of every operation: choice of the implementation, copies to a device, limits for compilers
and autograd.

Files named `*_kernel.py` import triton; all others import those only where HAS_TRITON is true.
"""

import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._guards import detect_fake_mode

try:
    import triton  # noqa: F401
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

Function = TypeVar("Function", bound=Callable[..., Any])


def use_triton(impl: str | None, *tensors: Tensor | None) -> bool:
    """Whether the Triton kernels run. impl None: where triton is installed, all tensors are on a
    GPU and none is fp64. "triton" and "eager" force. Raises ValueError for another name, and where
    Triton is forced but is not installed or cannot take the tensors.
    """
    if impl not in (None, "triton", "eager"):
        raise ValueError(f'impl must be None, "triton" or "eager", got {impl!r}')
    present = [tensor for tensor in tensors if tensor is not None]
    on_gpu = all(tensor.is_cuda for tensor in present)
    fp64 = any(tensor.dtype == torch.float64 for tensor in present)
    if impl == "triton" and not HAS_TRITON:
        raise ValueError(
            'impl="triton" needs the package triton, which is not installed; use impl=None or "eager"'
        )
    if impl == "triton" and fp64:
        raise ValueError('impl="triton" computes in fp32 and got an fp64 tensor; use impl="eager"')
    if impl == "triton" and not (on_gpu or INTERPRET):
        raise ValueError(
            'impl="triton" needs CUDA tensors (or TRITON_INTERPRET=1 in the environment)'
        )
    return impl == "triton" or (impl is None and HAS_TRITON and on_gpu and not fp64)


def on_device(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """values on a device and in a dtype, without waiting for the device: from the CPU by way of
    pinned memory.
    """
    values = values.to(dtype=dtype)
    if values.device.type == "cpu" and device.type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


UNTRACED = "leave fastp3o_kernels outside of fullgraph=True, torch.export and fake tensors, as `expose_head` does"


def graph_break(function: Function) -> Function:
    """A compiled model calls the function as it is: one graph break a call, and no compilation at
    new shapes. A loss is matrix products and our kernels, whose number and order follow from the
    lengths of responses. A compiler has nothing to fuse there, and much to recompile. As an
    operator of torch.library it would not see autocast.
    """

    @wraps(function)
    def untraced(*args: Any, **kwargs: Any) -> Any:
        if detect_fake_mode((args, kwargs)) is not None:
            raise RuntimeError(UNTRACED)
        return function(*args, **kwargs)

    # `torch.compiler.disable` would import the compiler here, which takes longer than all else that
    # we import. This one marks torch's own functions, and imports it at the first call.
    disabled = torch._disable_dynamo(untraced)
    # The error with fullgraph=True.
    vars(disabled).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=UNTRACED)
    return cast(Function, disabled)


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the backward of an autograd function raise RuntimeError if a graph of the gradients is
    asked for. PyTorch would take the gradients for constants, so that a penalty on them would train
    nothing.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fastp3o computes first derivatives only, and create_graph=True asks for the gradient's own gradient"
            )
        return backward(ctx, *gradients)

    return refusing
