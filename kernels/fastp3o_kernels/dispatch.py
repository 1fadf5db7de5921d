"""Which implementation runs: the Triton kernels or plain PyTorch."""

import os

import torch
from torch import Tensor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(impl: str | None, *tensors: Tensor) -> bool:
    """None: Triton where all tensors are on a GPU and none is fp64. "triton" and "eager" force.

    Raises ValueError for another name, and where Triton is forced on tensors that it cannot take.
    """
    if impl not in (None, "triton", "eager"):
        raise ValueError(f'impl must be None, "triton" or "eager", got {impl!r}')
    on_gpu = all(tensor.is_cuda for tensor in tensors)
    fp64 = any(tensor.dtype == torch.float64 for tensor in tensors)
    if impl == "triton" and fp64:
        raise ValueError('impl="triton" computes in fp32 and got an fp64 tensor; use impl="eager"')
    if impl == "triton" and not (on_gpu or INTERPRET):
        raise ValueError('impl="triton" needs CUDA tensors (or TRITON_INTERPRET=1 in the environment)')
    return impl == "triton" or (impl is None and on_gpu and not fp64)
