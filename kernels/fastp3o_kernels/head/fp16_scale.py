"""The scale of gradients of logits where the products are fp16, which ends at 65504 and is coarse below 6e-5."""

import torch
from torch import Tensor

from fastp3o_kernels.head.backward import HeadGradients

# The largest coefficient, whatever means a loss takes inside and however large its rewards are: where coefficients are
# a sixteenth of it, a probability of 1e-6 keeps three digits, and products with large weights stay finite.
LARGEST = 1024.0
# Where no coefficient yet is above 0.
HIGHEST = 2.0**64


class Fp16Scale:
    """What coefficients are multiplied by: a power of two that falls from chunk to chunk where larger ones come. The
    host never waits for it.

    value: 0-d fp32, on the device.
    """

    def __init__(self, gradients: HeadGradients, device: torch.device):
        self.gradients, self.begun = gradients, False
        self.value = torch.full((), HIGHEST, device=device)

    def lowered_for(self, *coefficients: Tensor | None) -> Tensor:
        """The scale for a chunk's coefficients, to which all gradients so far are brought."""
        largest = [values.abs().max() for values in coefficients if values is not None and len(values)]
        if largest:
            wanted = torch.exp2(torch.floor(torch.log2(LARGEST / torch.stack(largest).max())))
            before, self.value = self.value, torch.minimum(wanted, self.value)
            if self.begun:
                self.gradients.rescale(self.value / before)
            self.begun = True
        return self.value


def fp16_scale(gradients: HeadGradients | None, multiplied: torch.dtype, device: torch.device) -> Fp16Scale | None:
    """None where no gradient is wanted, or products are not fp16.

    multiplied: the dtype of a product's operands.
    """
    return None if gradients is None or multiplied != torch.float16 else Fp16Scale(gradients, device)
