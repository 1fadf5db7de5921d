"""What a head does to its products before the softmax: bias, soft cap, temperature. In PyTorch and inside kernels.

V vocabulary.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor


class LogitsTransform(NamedTuple):
    """product -> (cap tanh((product + bias) / cap)) / temperature, in fp32.

    bias: [V]. softcap: Gemma's cap on logits. temperature: of the distribution that sampled.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0


def transform_(logits: Tensor, transform: LogitsTransform) -> Tensor:
    """The transform in place, on rows [n, V] of fp32 or fp64."""
    if transform.bias is not None:
        logits.add_(transform.bias)
    if transform.softcap is not None:
        logits.div_(transform.softcap).tanh_().mul_(transform.softcap)
    return logits.div_(transform.temperature) if transform.temperature != 1 else logits


def slope_(transformed: Tensor, transform: LogitsTransform) -> Tensor:
    """d transformed / d product under a soft cap, overwriting its argument."""
    tanh = transformed.mul_(transform.temperature / transform.softcap)
    return tanh.square_().neg_().add_(1).div_(transform.temperature)


def kernel_arguments(transform: LogitsTransform, unused: Tensor) -> dict[str, Tensor | float | bool]:
    """The transform as the kernels take it; `unused` stands where there is no bias to point at."""
    return {
        "bias_ptr": unused if transform.bias is None else transform.bias,
        "softcap": 1.0 if transform.softcap is None else float(transform.softcap),
        "inverse_temperature": 1 / transform.temperature,
        "HAS_BIAS": transform.bias is not None,
        "HAS_SOFTCAP": transform.softcap is not None,
    }


@triton.jit
def load_logits(logits_ptr, bias_ptr, columns, inside, softcap, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Logits before the temperature, -inf outside the vocabulary, and what the soft cap leaves of their slope."""
    x = tl.load(logits_ptr + columns, mask=inside, other=-float("inf")).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    slope = 1.0
    if HAS_SOFTCAP:
        # tanh z = 1 - 2 r; exp overflows to infinity and underflows to 0 where tanh is 1 and -1.
        r = 1.0 / (tl.exp(2.0 * (x / softcap)) + 1.0)
        x = tl.where(inside, softcap * (1.0 - 2.0 * r), -float("inf"))
        slope = 4.0 * r * (1.0 - r)
    return x, slope
