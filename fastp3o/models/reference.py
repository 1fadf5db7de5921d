"""The policy that the KL is measured against: a second model, or a LoRA policy without its adapters."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fastp3o.models.frozen import FrozenModel
from fastp3o.models.packed_model import PackedModel, scored_logprobs
from fastp3o.models.sharding import passes
from fastp3o.models.trainable import adapters_off
from fastp3o.packing.packed_row import PackedRow


class Reference(ABC):
    """Log-probabilities of a frozen policy; some move between updates."""

    @abstractmethod
    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Of the scored tokens of each row, [N] fp32."""

    def follow(self, policy: PackedModel, update: int) -> None:  # noqa: B027 - most stay where they are
        """Goes after the policy, once an update of it is made."""


class SecondModel(Reference):
    """A model of its own."""

    def __init__(self, model: PackedModel, device: torch.device, mesh: DeviceMesh | None = None, *, offload: bool):
        self.model, self.frozen = model, FrozenModel(model, device, mesh, offload=offload)

    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        return self.frozen.passes(rows, scored_logprobs)


class WithoutAdapters(Reference):
    """The base of a LoRA policy; takes no memory of its own."""

    def __init__(self, policy: PackedModel):
        self.policy = policy

    @torch.no_grad()
    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        with adapters_off(self.policy):
            return passes(rows, partial(scored_logprobs, self.policy))


class LoadedForEachUse(Reference):
    """A model that is in memory only while it computes."""

    def __init__(self, load: Callable[[], Reference]):
        self.load = load

    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        try:
            return self.load()(rows)
        finally:
            # A model that is spread over processes refers to itself.
            gc.collect()
