"""Dropout of LoRA adapters' inputs, which only passes that train have.

Log-probs of evaluations, references, old policies and KTO's reference point come from the same model in the same mode,
and must not be random.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn.functional as F
from torch import Tensor, nn


class SwitchedDropout(nn.Dropout):
    """Dropout that is off outside of `dropout_on`, also in training mode. It draws from torch's global generator, which
    states hold.
    """

    on = False

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout(input, self.p, training=self.on)


def use_switched_dropout(model: nn.Module, p: float) -> None:
    """Gives all adapters of a model dropout with this probability."""
    for module in model.modules():
        dropouts = getattr(module, "lora_dropout", None)
        if isinstance(dropouts, nn.ModuleDict):
            dropouts.update({adapter: SwitchedDropout(p) for adapter in dropouts})


@contextmanager
def dropout_on(model: nn.Module) -> Iterator[None]:
    """Within the block adapters have dropout, if they were given any. Backward passes, which may compute activations
    again, belong into it.
    """
    switched = [module for module in model.modules() if isinstance(module, SwitchedDropout)]
    for module in switched:
        module.on = True
    try:
        yield
    finally:
        for module in switched:
            module.on = False
