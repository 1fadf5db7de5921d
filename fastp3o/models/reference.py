"""The frozen policy that the KL is measured against: a second model, or a LoRA policy without its adapters."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fastp3o.models.packed_model import PackedModel, scored_logprobs, unwrap
from fastp3o.models.trainable import adapters_off
from fastp3o.packing.packed_row import PackedRow

# Rows -> log-probabilities of the scored tokens of each, [N] fp32.
Reference = Callable[[Sequence[PackedRow]], list[Tensor]]


class SecondModel:
    """A model of its own; with `offload` it is on the CPU between uses."""

    def __init__(self, model: PackedModel, device: torch.device, *, offload: bool):
        self.model = model.eval().requires_grad_(False)
        self.device, self.offload = device, offload
        if offload:
            model.to("cpu")

    @torch.no_grad()
    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        with on_device(self.model, self.device, offload=self.offload):
            return [scored_logprobs(self.model, row) for row in rows]


class WithoutAdapters:
    """The base of a LoRA policy; takes no memory of its own."""

    def __init__(self, policy: nn.Module):
        self.policy = policy

    @torch.no_grad()
    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        with adapters_off(unwrap(self.policy)):
            return [scored_logprobs(self.policy, row) for row in rows]


@contextmanager
def on_device(model: nn.Module, device: torch.device, *, offload: bool) -> Iterator[None]:
    if offload:
        model.to(device)
    try:
        yield
    finally:
        if offload:
            model.to("cpu")
