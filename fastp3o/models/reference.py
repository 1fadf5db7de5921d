"""The policy that the KL is measured against: a second model, which may follow the policy, or a
LoRA policy's base.
"""

import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.sharding import FrozenModel, map_rows_in_lockstep
from fastp3o.models.trainable import adapters_off
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.packed_row import Ids, PackedRow
from fastp3o.runtime.shares import local_part

# A model's values of a row's labeled tokens, [N, ...].
TokenValues = Callable[[PackedModel, PackedRow], Tensor]


class Reference(ABC):
    """Log-probabilities of a frozen policy; some references move between updates."""

    model: PackedModel  # that of a LoadedForEachUse only while it computes

    def __call__(self, rows: Sequence[PackedRow]) -> list[Tensor]:
        """Log-probabilities of each row's labeled tokens, [N] fp32."""
        return self.map_rows(rows, labeled_logprobs)

    @abstractmethod
    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        """Calls `compute` with the frozen policy and each row, without gradients."""

    def follow(self, policy: PackedModel, update: int) -> None:  # noqa: B027 - most stay the same
        """Updates the reference after the policy's update of this number."""


class SecondModel(Reference):
    """A separate model."""

    def __init__(
        self,
        model: PackedModel,
        device: torch.device,
        mesh: DeviceMesh | None = None,
        *,
        offload: bool,
    ):
        self.model, self.frozen = model, FrozenModel(model, device, mesh, offload=offload)

    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        return self.frozen.map_rows(rows, compute)


class WithoutAdapters(Reference):
    """The model that a LoRA policy started from, which is the policy without its adapters: it takes
    no extra memory.
    """

    def __init__(self, policy: PackedModel):
        self.model = policy

    @torch.no_grad()
    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        with adapters_off(self.model):
            return map_rows_in_lockstep(rows, partial(compute, self.model))


class NoReference(Reference):
    """Stands in for a reference where no loss reads one: all its log-probs are 0."""

    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        return [torch.zeros(len(row.labels), device=row.labels.device) for row in rows]


class LoadedForEachUse(Reference):
    """A model that is in memory only while it computes."""

    def __init__(self, load: Callable[[], Reference]):
        self.load = load

    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        try:
            return self.load().map_rows(rows, compute)
        finally:
            # A model that is spread over processes refers to itself.
            gc.collect()


class MovingReference(Reference):
    """A second model whose weights are set after updates of the policy. every: updates between
    copies of the policy's weights; 0 for none. decay: after each update the weights become the mean
    decay w_ref + (1 - decay) w; 0 for none.
    """

    def __init__(self, reference: SecondModel, *, every: int, decay: float):
        self.reference = reference
        self.model = reference.model
        self.every = every
        self.decay = decay
        self.weights: dict[str, nn.Parameter] = dict(self.model.named_parameters())
        # Steps of 1 - decay would be lost in half precision.
        half = {
            name: weight for name, weight in self.weights.items() if weight.dtype != torch.float32
        }
        self.means = (
            {name: weight.detach().float() for name, weight in half.items()} if decay else {}
        )

    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        return self.reference.map_rows(rows, compute)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a checkpointed state must hold; they are filled in place."""
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


class InContext(Reference):
    """A reference that sees a context before each prompt, after its beginning-of-sequence token
    `bos`; the policy does not. packing: for its own rows, which are longer than those that it is
    called with. moved: turns the ids of a prompt into those that follow the context.
    """

    def __init__(
        self,
        reference: Reference,
        context: Ids,
        bos: int | None,
        packing: Packing,
        moved: Callable[[Ids], Ids] = lambda ids: ids,
    ):
        self.reference = reference
        self.context = context
        self.bos = bos
        self.packing = packing
        self.moved = moved

    def map_rows(self, rows: Sequence[PackedRow], compute: TokenValues) -> list[Tensor]:
        numbers = [number for row in rows for number in row.groups]
        groups = [group for row in rows for group in row.given]
        prompts = []
        for group in groups:
            begin = int(group.prompt[0] == self.bos)  # tokens before the context: bos or none
            rest = self.moved(group.prompt[begin:])
            prompts.append([*group.prompt[:begin], *self.context, *rest])
        longer = pack(
            prompts,
            [group.responses for group in groups],
            self.packing,
            groups=numbers,
            labeled=[group.labeled for group in groups],
        )
        longer = [row.to(rows[0].labels.device) for row in longer]
        # The longer rows hold the groups in another order: their values are taken apart by groups,
        # and put together as the caller's rows have them.
        by_number: dict[int, Tensor] = {}
        for row, values in zip(longer, self.reference.map_rows(longer, compute), strict=True):
            lengths = row.cu_seqlens_on_host[:: row.responses_per_prompt].diff().tolist()
            by_number |= zip(row.groups, values.split(lengths), strict=True)
        return [torch.cat([by_number[number] for number in row.groups]) for row in rows]

    def follow(self, policy: PackedModel, update: int) -> None:
        self.reference.follow(policy, update)
