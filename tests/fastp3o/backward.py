"""Backward passes and metrics of losses, as a step of the trainer makes them."""

from torch import Tensor

from fastp3o.optimizer.optimizer import Optimizer


def scaled_backward(optimizer: Optimizer, loss: Tensor) -> None:
    """In fp16 the trainer's losses come with the scale in their divisor."""
    (loss if optimizer.loss_scale is None else loss * optimizer.loss_scale).backward()


def means(metrics: dict[str, Tensor]) -> dict[str, Tensor]:
    """Metrics of a loss, sums with counts divided, 0-d."""
    return {name: value[0] / value[1] if value.dim() else value for name, value in metrics.items()}
