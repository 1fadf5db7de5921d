"""Rows of logits with their labels, and a head's transform of its matrix products before the
softmax.

n rows, one a token; V vocabulary.
"""

from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from torch import Tensor

from fastp3o_kernels.checks import checked_number

# This ignore_index ignores no label.
NO_LABEL = -(2**31)

# Rows that begin at a multiple of this many elements are read in the widest loads, by matrix
# products and by kernels: Triton has a variant for strides that it divides.
ALIGNMENT = 16


def padded(V: int) -> int:
    """Elements of a row of V logits in a buffer of ours."""
    return -(-V // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitsTransform:
    """product -> (softcap tanh((product + bias) / softcap)) / temperature, in fp32.

    Args:
        bias: [V] of any floating dtype, or None.
        softcap: Gemma's cap on logits, or None.
        temperature: of the distribution that sampled.

    Raises:
        ValueError: for a soft cap or a temperature that is no finite number above 0.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", checked_number("temperature", self.temperature))
        if not 0 < self.temperature < inf:
            raise ValueError(f"temperature must be above 0 and finite, got {self.temperature}")
        if self.softcap is not None:
            object.__setattr__(self, "softcap", checked_number("softcap", self.softcap))
            if not 0 < self.softcap < inf:
                raise ValueError(f"softcap must be above 0, or None for no cap, got {self.softcap}")


class Rows(NamedTuple):
    """Logits before the transform [n, V], with the label of each row [n]; rows of label
    `ignore_index` count as 0.
    """

    logits: Tensor
    labels: Tensor
    transform: LogitsTransform = LogitsTransform()
    ignore_index: int = NO_LABEL

    def part(self, rows: slice) -> "Rows":
        return self._replace(logits=self.logits[rows], labels=self.labels[rows])


def gather_indices(labels: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Flags of the ignored labels [n], and indices [n, 1] into a vocabulary, 0 for those labels."""
    ignored = labels == ignore_index
    return ignored, labels.masked_fill(ignored, 0).long().unsqueeze(1)


def capped(products: Tensor, transform: LogitsTransform) -> Tensor:
    """The transform of rows [n, V] of fp32 or fp64, which stay as they are, before the temperature."""
    logits = with_bias(products, transform)
    return (
        logits
        if transform.softcap is None
        else (logits / transform.softcap).tanh_().mul_(transform.softcap)
    )


def transformed(products: Tensor, transform: LogitsTransform) -> Tensor:
    logits = capped(products, transform)
    return logits / transform.temperature if transform.temperature != 1 else logits


def slope(products: Tensor, transform: LogitsTransform) -> Tensor | float:
    """d transformed / d product: [n, V] under a soft cap, else one number for all."""
    if transform.softcap is None:
        return 1 / transform.temperature
    # 1 - tanh² from an exponential: tanh itself is rounded to 1 near the cap.
    decay = (with_bias(products, transform) / transform.softcap).abs_().mul_(-2).exp_()
    return (4 / transform.temperature) * decay / decay.add(1).square_()


def with_bias(products: Tensor, transform: LogitsTransform) -> Tensor:
    return products if transform.bias is None else products + transform.bias.to(products.dtype)
