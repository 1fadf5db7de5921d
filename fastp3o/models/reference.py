"""The policy that the KL is measured against: a second model, which may follow the policy, or a LoRA policy's base."""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.sharding import FrozenModel, map_rows_in_lockstep
from fastp3o.packing.packed_row import PackedRow
from fastp3o.processes import local_part


class Reference(ABC):
    """Log-probabilities of a frozen policy; some references move between updates."""

    @abstractmethod
    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Log-probabilities of each row's labelled tokens, [N] fp32."""

    def follow(self, policy: PackedModel, update: int) -> None:  # noqa: B027 - most stay the same
        """Moves after the policy's update of this number."""


class SecondModel(Reference):
    """A model of its own."""

    def __init__(self, model: PackedModel, device: torch.device, mesh: DeviceMesh | None = None, *, offload: bool):
        self.model, self.frozen = model, FrozenModel(model, device, mesh, offload=offload)

    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        return self.frozen.map_rows(rows, labelled_logprobs)


class WithoutAdapters(Reference):
    """The base of a LoRA policy; takes no memory of its own."""

    def __init__(self, policy: PackedModel):
        self.policy = policy

    @torch.no_grad()
    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        with adapters_off(self.policy):
            return map_rows_in_lockstep(rows, partial(labelled_logprobs, self.policy))


@contextmanager
def adapters_off(model: PackedModel) -> Iterator[None]:
    """The policy without its LoRA adapters: the model that it started from."""
    model.model.disable_adapters()
    try:
        yield
    finally:
        model.model.enable_adapters()


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


class MovingReference(Reference):
    """A second model whose weights are set after updates of the policy.

    every: updates between copies of the policy's weights; 0 for none. decay: after each update the weights become the
    mean decay w_ref + (1 - decay) w; 0 for none.
    """

    def __init__(self, reference: SecondModel, *, every: int, decay: float):
        self.reference, self.every, self.decay = reference, every, decay
        self.weights: dict[str, nn.Parameter] = dict(reference.model.named_parameters())
        # Steps of 1 - decay would be lost in half precision.
        half = {name: weight for name, weight in self.weights.items() if weight.dtype != torch.float32}
        self.means = {name: weight.detach().float() for name, weight in half.items()} if decay else {}

    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        return self.reference(rows)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a state must hold, to be filled in place."""
        weights = {f"reference.{name}": weight.detach() for name, weight in self.weights.items()}
        return weights | {f"reference_mean.{name}": mean for name, mean in self.means.items()}

    @torch.no_grad()
    def follow(self, policy: PackedModel, update: int) -> None:
        """The policy's layers are spread over the processes as the reference's are."""
        if self.every and update % self.every:
            return
        now = dict(policy.named_parameters())
        for name, weight in self.weights.items():
            place, value = local_part(weight), local_part(now[name])
            if self.decay:
                mean = local_part(self.means.get(name, weight))
                value = mean.lerp_(value.to(mean), 1 - self.decay)
            place.copy_(value)
