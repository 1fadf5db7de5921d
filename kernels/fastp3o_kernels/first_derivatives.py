"""Backward passes that are computed by hand, once."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Of an autograd function's backward. Raises RuntimeError where a graph of the gradients is asked for: PyTorch
    would take them for constants, so that a penalty on them would train nothing.
    """

    @wraps(backward)
    def refusing(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fastp3o computes first derivatives alone, and create_graph=True asks for the gradient's own gradient"
            )
        return backward(ctx, *gradients)

    return refusing
