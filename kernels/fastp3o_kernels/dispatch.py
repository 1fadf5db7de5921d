"""Which implementation runs: the Triton kernels or plain PyTorch.

Files named `*_kernel.py` import triton; all others import those only where HAS_TRITON is true.
"""

import os

import torch
from torch import Tensor

try:
    import triton  # noqa: F401
except ImportError:
    HAS_TRITON = False
else:
    HAS_TRITON = True

INTERPRET = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def use_triton(impl: str | None, *tensors: Tensor | None) -> bool:
    """Whether the Triton kernels run. impl None: where triton is installed, all tensors are on a GPU and none is fp64.
    "triton" and "eager" force.

    Raises ValueError for another name, and where Triton is forced but is not installed or cannot take the tensors.
    """
    if impl not in (None, "triton", "eager"):
        raise ValueError(f'impl must be None, "triton" or "eager", got {impl!r}')
    given = [tensor for tensor in tensors if tensor is not None]
    on_gpu = all(tensor.is_cuda for tensor in given)
    fp64 = any(tensor.dtype == torch.float64 for tensor in given)
    if impl == "triton" and not HAS_TRITON:
        raise ValueError(
            'impl="triton" needs the package triton, which is not installed; use impl=None or impl="eager"'
        )
    if impl == "triton" and fp64:
        raise ValueError('impl="triton" computes in fp32 and got an fp64 tensor; use impl="eager"')
    if impl == "triton" and not (on_gpu or INTERPRET):
        raise ValueError('impl="triton" needs CUDA tensors (or TRITON_INTERPRET=1 in the environment)')
    return impl == "triton" or (impl is None and HAS_TRITON and on_gpu and not fp64)
