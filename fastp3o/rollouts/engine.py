"""Responses from the policy's own weights: prompts once through it, then one token of each response a step.

A step is a packed row of one token for each slot. Which token is next, whether it ends the response, and which response
the slot takes then is decided on the device too: the host looks every few steps only, to see whether all are done, and
on a GPU a step is a CUDA graph. On a CPU, where looking costs nothing and each slot costs time, idle ones are dropped.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.layout import Ids
from fastp3o.rollouts.cache import Cache
from fastp3o.rollouts.compiled import CompiledBody
from fastp3o.rollouts.graph import StepGraph
from fastp3o.rollouts.logits import head_logits
from fastp3o.rollouts.prefill import TOKENS_PER_ROW, prefill
from fastp3o.rollouts.queue import Queue
from fastp3o.rollouts.room import LayerShape, Room
from fastp3o.rollouts.sampling_settings import POLICY_ITSELF, SamplingSettings
from fastp3o_kernels.decoding import Slots, sample_tokens

# Steps between two looks of the host. So many less one may be for nothing.
STEPS_PER_LOOK = 8
# Share of slots that are idle before they are dropped: that copies the others' keys.
IDLE = 0.15


class Engine:
    """One batch of prompts after the other through the same memory, as long as it has room for them.

    static: shapes stay for the whole of a batch, as a CUDA graph needs it; by default on all devices but CPUs.
    graph: whether steps are captured, by default on GPUs. compiles: whether torch compiles the body, for which shapes
    must stay.
    """

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
        compiles: bool = False,
        impl: str | None = None,
        tokens_per_row: int = TOKENS_PER_ROW,
    ):
        self.policy, self.settings, self.tokens_per_row = policy, vars(settings), tokens_per_row
        device = policy.model.device
        self.static = device.type != "cpu" or compiles if static is None else static
        self.room, self.cache = room, Cache(shapes, room, device, impl=impl)
        self.queue = Queue(room, end_ids, device)
        self.body = CompiledBody(policy) if compiles else policy.hidden_states
        self.head = policy.head()
        self.captures = device.type == "cuda" if graph is None else graph
        self.graph = StepGraph()

    @torch.no_grad()
    def run(self, prompts: Sequence[Ids], keys: Tensor) -> tuple[list[list[Ids]], list[list[list[float]]]]:
        """Responses to at most as many prompts as there is room for, and log-probabilities of their tokens, [p][K].

        keys: [p, K] int64, of the responses' random numbers (`fastp3o_kernels.decoding.response_keys`).
        """
        self.queue.fill(prompts, keys)
        self.prefill(prompts)
        advance = self.graph.ready(self.step, self.tensors()) if self.captures else self.step
        while self.queue.working().any():
            if not self.static:
                self.drop_idle_slots()
            for _ in range(STEPS_PER_LOOK if self.static else 1):
                advance()
        return self.queue.results(len(prompts))

    def prefill(self, prompts: Sequence[Ids]) -> None:
        self.cache.take_memory()
        prefill(self.policy, self.cache, prompts, pad=self.static, tokens_per_row=self.tokens_per_row)

    def step(self) -> None:
        """One token for every slot. With static shapes nothing in it waits for the device."""
        queue = self.queue
        logits = self.logits(queue.slots(bounds=not self.static))
        tokens, logprobs = sample_tokens(logits, queue.keys[queue.response], queue.steps, **self.settings)
        queue.take(tokens, logprobs)

    def logits(self, slots: Slots) -> Tensor:
        """Of the next token of each slot."""
        self.cache.slots = slots
        hidden = self.body(self.queue.tokens[None], (slots.prompt_lengths + slots.steps)[None], cache=self.cache)
        return head_logits(hidden, self.head)

    def tensors(self) -> list[Tensor]:
        """All that steps read and write beside what they make."""
        model = self.policy.model
        return [*model.parameters(), *model.buffers(), *self.cache.tensors(), *self.queue.tensors()]

    def release_memory(self) -> None:
        """Gives the cache's memory back until the next batch."""
        self.cache.release_memory()

    def drop_idle_slots(self) -> None:
        working = self.queue.working()
        if working.sum() <= (1 - IDLE) * len(working):
            self.keep_slots(working.nonzero().squeeze(1))

    def keep_slots(self, kept: Tensor) -> None:
        self.queue.keep_slots(kept)
        self.cache.keep_slots(kept)
