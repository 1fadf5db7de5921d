"""Dtypes of the head's matrix products, and products whose result is wider than their operands."""

from typing import NamedTuple

import torch
from torch import Tensor


class HeadDtypes(NamedTuple):
    """Operands in half precision (an autocast's too) are multiplied as they are by CUDA, with fp32 results: logits are
    never rounded to half precision. Other devices have no such product: operands are widened first.
    """

    rounded: torch.dtype  # of hidden states and weight after rounding: autocast's dtype, or their own
    multiplied: torch.dtype  # of a product's operands, so also of the gradients of logits
    logits: torch.dtype  # of logits, log-probs and sums over tokens

    @classmethod
    def for_hidden(cls, hidden: Tensor) -> "HeadDtypes":
        """The dtypes for these hidden states under the autocast that is active now."""
        device = hidden.device.type
        autocast = torch.is_autocast_enabled(device) and hidden.dtype != torch.float64
        rounded = torch.get_autocast_dtype(device) if autocast else hidden.dtype
        half = rounded in (torch.float16, torch.bfloat16)
        return cls(
            rounded=rounded,
            multiplied=torch.float32 if half and device != "cuda" else rounded,
            logits=torch.float32 if half else rounded,
        )

    def cast(self, operand: Tensor) -> Tensor:
        return operand.to(self.rounded).to(self.multiplied)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, accumulate: bool = False) -> None:
    """out (+)= a @ b. An fp32 result of operands in half precision is not rounded to their dtype in between."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out) if accumulate else torch.mm(a, b, out=out)
    elif a.is_cuda and out.dtype == torch.float32:
        if accumulate:
            torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
        else:
            torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        product = torch.mm(a, b)
        out.add_(product) if accumulate else out.copy_(product)
