"""Responses from the policy's own weights: prompts once through it, then one token of each response a step.

A step is a packed row of one token for each slot. The device decides everything in it: which token is next, whether it
ends the response, and which response the slot takes then. The host looks only every few steps whether all are done, and
on a GPU a step is a CUDA graph. On a CPU, where looking costs nothing and each slot costs time, idle slots are dropped.
"""

from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.cache import Cache, LayerShape, Room
from fastp3o.rollouts.prefill import TOKENS_PER_ROW, prefill
from fastp3o.rollouts.queue import Queue
from fastp3o.rollouts.sampler import POLICY_ITSELF, SamplingSettings
from fastp3o.rollouts.steps import StepGraph
from fastp3o_kernels import Head
from fastp3o_kernels.decoding import Slots, sample_tokens
from fastp3o_kernels.head.head import HeadDtypes, multiply
from fastp3o_kernels.rows.rows import transformed

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
        self.policy, self.settings = policy, asdict(settings)
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
