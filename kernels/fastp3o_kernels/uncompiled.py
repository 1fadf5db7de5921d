"""What torch.compile leaves alone."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def uncompiled(function: Function) -> Function:
    """A compiled model calls the function as it is: one graph break for each call, and no compilation at new shapes.

    A loss is matrix products and kernels of its own, whose number and order follow from the lengths of responses. There
    is nothing for a compiler to fuse, and much to recompile.
    """
    return torch.compiler.disable(function, reason="fastp3o's losses run their own kernels, in chunks of any size")
