"""What a head does to its matrix products before the softmax: bias, soft cap, temperature.

V vocabulary.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class LogitsTransform:
    """product -> (softcap tanh((product + bias) / softcap)) / temperature, in fp32.

    Args:
        bias: [V] of any floating dtype, or None.
        softcap: Gemma's cap on logits, or None.
        temperature: of the distribution that sampled.

    Raises:
        ValueError: for a soft cap or a temperature that is not above 0.
    """

    bias: Tensor | None = None
    softcap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, or None for no cap, got {self.softcap}")


def transform_(logits: Tensor, transform: LogitsTransform) -> Tensor:
    """The transform in place, on rows [n, V] of fp32 or fp64."""
    if transform.bias is not None:
        logits.add_(transform.bias)
    if transform.softcap is not None:
        logits.div_(transform.softcap).tanh_().mul_(transform.softcap)
    return logits.div_(transform.temperature) if transform.temperature != 1 else logits


def slope_(transformed: Tensor, transform: LogitsTransform) -> Tensor:
    """d transformed / d product under a soft cap, which there must be, overwriting its argument."""
    assert transform.softcap is not None
    tanh = transformed.mul_(transform.temperature / transform.softcap)
    return tanh.square_().neg_().add_(1).div_(transform.temperature)
