"""A reference that goes after the policy: its copy every few updates, or the exponential mean of what it was."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fastp3o.models.packed_model import PackedModel
from fastp3o.models.reference import Reference, SecondModel
from fastp3o.packing.packed_row import PackedRow


class MovingReference(Reference):
    """A second model whose weights are set after updates of the policy.

    every: to the policy's after each so many updates; 0 never. decay: to the mean w_ref <- decay w_ref + (1 - decay) w
    after each update; 0 for none.
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
        """What a state must hold, to be filled in place."""
        weights = {f"reference.{name}": weight.detach() for name, weight in self.weights.items()}
        return weights | {f"reference_mean.{name}": mean for name, mean in self.means.items()}

    @torch.no_grad()
    def follow(self, policy: PackedModel, update: int) -> None:
        """The policy's layers are spread over the processes as the reference's are."""
        if self.every and update % self.every:
            return
        own = dict(policy.named_parameters())
        for name, weight in self.weights.items():
            now = part(own[name])
            if self.decay:
                mean = part(self.means.get(name, weight))
                now = mean.lerp_(now.to(mean.device, mean.dtype), 1 - self.decay)
            part(weight).copy_(now)


def part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
