"""Responses from the policy's own weights: prompts once through it, then one token of each response a step.

A step is a packed row of one token for each slot. The device decides everything in it: which token is next, whether it
ends the response, and which response the slot takes then. The host looks only every few steps whether all are done, and
on a GPU a step is a CUDA graph. On a CPU, where looking costs nothing and each slot costs time, idle slots are dropped.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.pack import first_fit_decreasing
from fastp3o.packing.packed_row import Ids, Segments, offsets, to_device
from fastp3o.rollouts.cache import Cache, LayerShape, Room
from fastp3o.rollouts.groups import POLICY_ITSELF, SamplingSettings
from fastp3o.rollouts.queue import Queue
from fastp3o.rollouts.steps import StepGraph
from fastp3o_kernels import Head
from fastp3o_kernels.decoding import Slots, sample_tokens
from fastp3o_kernels.head.head import HeadDtypes, multiply
from fastp3o_kernels.rows.rows import transformed

# Length of a packed row of prompts: enough for large matrix products.
TOKENS_PER_ROW = 2048
# Steps between two looks of the host; all but one of them may be for nothing.
STEPS_PER_LOOK = 8
# Share of slots that are idle before they are dropped, which copies the keys of the others.
IDLE = 0.15


class Engine:
    """Samples one batch of prompts after the other in the same memory, as long as it has room for them.

    static: whether shapes stay for a whole batch, as a CUDA graph needs; by default on all devices except CPUs. graph:
    whether steps are captured; by default on GPUs.
    """

    tokens_per_row = TOKENS_PER_ROW  # of a packed row of prompts

    def __init__(
        self,
        policy: PackedModel,
        shapes: dict[int, LayerShape],
        room: Room,
        end_ids: set[int],
        settings: SamplingSettings = POLICY_ITSELF,
        *,
        static: bool | None = None,
        graph: bool | None = None,
    ):
        self.policy = policy
        self.settings = {name: getattr(settings, name) for name in ("top_k", "top_p", "min_p")}
        device = policy.model.device
        self.static = device.type != "cpu" if static is None else static
        self.room, self.cache = room, Cache(shapes, room, device)
        self.queue = Queue(room, end_ids, device)
        self.head = policy.head()
        self.captures = device.type == "cuda" if graph is None else graph
        self.graph = StepGraph(device)

    @torch.no_grad()
    def run(self, prompts: Sequence[Ids], keys: Tensor) -> tuple[list[list[Ids]], list[list[list[float]]]]:
        """Token ids of responses to at most as many prompts as there is room for, and their log-probabilities, [p][K].

        keys: [p, K] int64, keys of the responses' random numbers (`fastp3o_kernels.decoding.response_keys`).
        """
        self.queue.fill(prompts, keys)
        self.prefill(prompts)
        advance = self.graph.ready(self.step, self.tensors()) if self.captures else self.step
        works = True
        while works:
            for _ in range(STEPS_PER_LOOK if self.static else 1):
                advance()
            working = self.queue.working()
            works = bool(working.any())
            if works and not self.static:
                self.drop_idle_slots(working)
        return self.queue.results(len(prompts))

    def prefill(self, prompts: Sequence[Ids]) -> None:
        self.cache.take_memory()
        prefill(self.policy, self.cache, prompts, pad=self.static, tokens_per_row=self.tokens_per_row)

    def step(self) -> None:
        """Samples one token for every slot. With static shapes the host never waits for the device."""
        queue = self.queue
        logits = self.logits(queue.slots(bounds=not self.static))
        tokens, logprobs = sample_tokens(logits, queue.keys[queue.response], queue.steps, **self.settings)
        queue.take(tokens, logprobs)

    def logits(self, slots: Slots) -> Tensor:
        """Logits of the next token of each slot, [R, V]."""
        self.cache.slots = slots
        positions = (slots.prompt_lengths + slots.steps)[None]
        hidden = self.policy.hidden_states(self.queue.tokens[None], positions, cache=self.cache)
        return head_logits(hidden, self.head)

    def tensors(self) -> list[Tensor]:
        """All tensors that outlive a step and that it reads or writes."""
        model = self.policy.model
        return [*model.parameters(), *model.buffers(), *self.cache.tensors(), *self.queue.tensors()]

    def release_memory(self) -> None:
        """Gives the cache's memory back until the next batch."""
        self.cache.release_memory()

    def drop_idle_slots(self, working: Tensor) -> None:
        if working.sum() <= (1 - IDLE) * len(working):
            self.keep_slots(working.nonzero().squeeze(1))

    def keep_slots(self, kept: Tensor) -> None:
        self.queue.keep_slots(kept)
        self.cache.keep_slots(kept)


def head_logits(hidden: Tensor, head: Head) -> Tensor:
    """[R, D] -> [R, V], fp32 or fp64 whatever the precision of the policy."""
    dtypes = HeadDtypes.for_hidden(hidden)
    logits = hidden.new_empty(len(hidden), len(head.weight), dtype=dtypes.logits)
    multiply(dtypes.cast(hidden), dtypes.cast(head.weight).T, out=logits)
    return transformed(logits, head)


class PromptRow(NamedTuple):
    """A packed row of T tokens. The first n belong to prompts, the others are padding."""

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    segments: Segments
    prompt_of_token: Tensor  # [n]
    position_of_token: Tensor  # [n]


def prefill(
    policy: PackedModel, cache: Cache, prompts: Sequence[Ids], *, pad: bool, tokens_per_row: int = TOKENS_PER_ROW
) -> None:
    """Puts keys and values of the prompts into the cache.

    pad: makes rows of equal length, since libraries on a GPU round differently at other shapes.
    """
    for row in prompt_rows(prompts, tokens_per_row, pad, policy.model.device):
        cache.prompt_of_token, cache.position_of_token = row.prompt_of_token, row.position_of_token
        policy.hidden_states(row.input_ids, row.position_ids, segments=row.segments, cache=cache)


def prompt_rows(prompts: Sequence[Ids], tokens_per_row: int, pad: bool, device: torch.device) -> Iterator[PromptRow]:
    cached = {p: ids[:-1] for p, ids in enumerate(prompts) if len(ids) > 1}
    numbers = list(cached)
    for members in first_fit_decreasing([len(ids) for ids in cached.values()], tokens_per_row):
        members = [numbers[m] for m in members]
        lengths = [len(cached[p]) for p in members]
        positions = torch.cat([torch.arange(length) for length in lengths])
        padding = -sum(lengths) % tokens_per_row if pad else 0
        # Padding is a segment of its own, all at position 0, which every model has.
        lengths += [padding] if padding else []
        input_ids = torch.tensor([token for p in members for token in cached[p]] + [0] * padding)
        prompt_of_token = torch.tensor(members).repeat_interleave(torch.tensor(lengths[: len(members)]))
        position_ids = torch.nn.functional.pad(positions, (0, padding))
        parts = input_ids[None], position_ids[None], offsets(lengths), prompt_of_token
        input_ids, position_ids, bounds, prompt_of_token = to_device(parts, device)
        segments = Segments(bounds, bounds, tuple(lengths), tuple(lengths), None)
        yield PromptRow(input_ids, position_ids, segments, prompt_of_token, position_ids[0, : len(positions)])


class LayerShapes:
    """A KeyValueCache that only notes the shapes of what it is given."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        if key.shape != value.shape:
            raise UserError(f"keys {list(key.shape)} and values {list(value.shape)} of layer {layer} differ in shape")
        self.shapes[layer] = LayerShape(value.shape[1], value.shape[2], value.dtype)

    def attend(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError("there are no responses to continue")


def layer_shapes(policy: PackedModel, token: int) -> dict[int, LayerShape]:
    """Shapes of the policy's keys by layer index. token: any token of the vocabulary.

    Raises UserError if heads of values have another size than those of keys.
    """
    shapes = LayerShapes()
    (row,) = prompt_rows([[token, token]], 1, False, policy.model.device)
    policy.hidden_states(row.input_ids, row.position_ids, segments=row.segments, cache=shapes)
    return shapes.shapes
