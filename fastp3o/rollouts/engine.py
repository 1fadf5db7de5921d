"""Responses from the policy's own weights: prompts once through it, then one token of each response
a step.

A step is a packed row of one token for each slot. The device decides everything in it: which token
is next, whether it ends the response, and which response the slot takes then. The host looks only
every few steps whether all are done, and on a GPU a step is a CUDA graph. On a CPU, where looking
costs nothing and each slot costs time, idle slots are dropped.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.models.joint_products import joint_products
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.bins import first_fit_decreasing
from fastp3o.packing.packed_row import Ids, Segments, joined, offsets, to_device
from fastp3o.rollouts.bundled_cache import BundledCache
from fastp3o.rollouts.cache import Cache, LayerShape, Room
from fastp3o.rollouts.groups import POLICY_ITSELF, SamplingSettings
from fastp3o.rollouts.queue import Queue
from fastp3o.rollouts.steps import StepGraph
from fastp3o_kernels import Head
from fastp3o_kernels.decoding import Slots, race_numbers, sample_tokens
from fastp3o_kernels.head.head import HeadDtypes, multiply
from fastp3o_kernels.rows.rows import padded, transformed

# Most tokens of a packed row of prompts: on a GPU its products take longer than their launches from
# Python.
TOKENS_PER_ROW = 8192
# On a GPU such rows are padded to a multiple of this: a product computes whole tiles, of 128 or 256
# tokens, and an allocator and libraries meet 32 shapes at most. No graph has any of them: only
# steps are captured.
TILE = 256
# A row of tokens that follow cached ones has as many keys for each of its tokens at most, which are
# copied.
KEYS_PER_TOKEN = 16
# Steps between two looks of the host; all but one of them may be for nothing.
STEPS_PER_LOOK = 8
# Steps whose random numbers are drawn at once where shapes change.
STEPS_OF_NUMBERS = 8
# Share of slots that are idle before they are dropped.
IDLE = 0.15


# --- steps of sampling ----------------------------------------------------------------------------


class Engine:
    """Samples one batch of prompts after the other in the same memory, as long as it has room for
    them. static: whether shapes stay for a whole batch, as a CUDA graph needs; by default on all
    devices except CPUs, and where slots take several responses. graph: whether steps are captured;
    by default on GPUs.
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
        self.static = (
            device.type != "cpu" or room.slots < room.responses if static is None else static
        )
        self.room = room
        self.cache = self.new_cache(shapes)
        self.caches = [self.cache]
        self.queue = Queue(room, end_ids, device)
        self.head = policy.head()
        # Its weight as products take it, while responses are sampled.
        self.widened: Tensor | None = None
        self.numbers: list[Tensor] = []  # of the next steps, where shapes change
        self.captures = device.type == "cuda" if graph is None else graph
        # A step on a CPU reads the same bytes either way, and products there round by their sizes.
        self.products = (
            joint_products(policy, partial(layer_shapes, policy, 0))
            if device.type == "cuda"
            else None
        )
        self.graph = StepGraph(device)

    def new_cache(self, shapes: dict[int, LayerShape]) -> Cache:
        return (Cache if self.static else BundledCache)(shapes, self.room, self.policy.model.device)

    def run(
        self, prompts: Sequence[Ids], keys: Tensor
    ) -> tuple[list[list[Ids]], list[list[list[float]]]]:
        """Token ids of responses to at most as many prompts as there is room for, and their
        log-probabilities, [p][K]. keys: [p, K] int64, keys of the responses' random numbers
        (`fastp3o_kernels.decoding.response_keys`).
        """
        with self.without_gradients():
            self.queue.fill(prompts, keys)
            self.prefill(prompts)
            self.decode()
            return self.queue.results(len(prompts))

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Also in inference mode where shapes change: a step's many small operations are shorter in
        it.
        """
        joint = nullcontext() if self.products is None else self.products.used()
        with torch.inference_mode(not self.static), torch.no_grad(), joint:
            yield

    def decode(self) -> None:
        """Steps until all responses of the queue have ended."""
        advance = self.graph.ready(self.step, self.tensors()) if self.captures else self.step
        self.widened, self.numbers, works = None, [], True
        while works:
            for _ in range(STEPS_PER_LOOK if self.static else 1):
                advance()
            works = bool(self.queue.working().any()) if self.static else self.drop_idle_slots()
        self.widened = None

    def prefill(self, prompts: Sequence[Ids]) -> None:
        prefill(
            self.policy, self.cache, prompts, pad=self.static, tokens_per_row=self.tokens_per_row
        )

    def step(self) -> None:
        """Samples one token for every slot. With static shapes the host never waits for the device."""
        queue = self.queue
        logits = self.logits(queue.slots())
        # Keys give the random numbers, if those are not known.
        keys = queue.keys if self.numbers else queue.keys[queue.response]
        if not self.static and not self.numbers:
            steps = queue.steps + torch.arange(STEPS_OF_NUMBERS)[:, None]
            drawn = race_numbers(keys.repeat(len(steps)), steps.flatten(), logits.shape[1])
            self.numbers = list(drawn.view(*steps.shape, -1).flip(0).unbind())
        numbers = self.numbers.pop() if self.numbers else None
        tokens, logprobs = sample_tokens(
            logits, keys, queue.steps, numbers=numbers, **self.settings
        )
        queue.take(tokens, logprobs)

    def logits(self, slots: Slots) -> Tensor:
        """Logits of the next token of each slot, [R, V]."""
        self.cache.begin_step(slots, self.queue.most_own_tokens)
        positions = (slots.prompt_lengths + slots.steps)[None]
        hidden = self.policy.hidden_states(self.queue.tokens[None], positions, cache=self.cache)
        if self.widened is None or self.captures:
            # A graph takes weights as they are when it is replayed.
            self.widened = HeadDtypes.for_hidden(hidden).cast(self.head.weight).T
        return head_logits(hidden, self.head, self.widened)

    def tensors(self) -> list[Tensor]:
        """All tensors that outlive a step and that it reads or writes."""
        model = self.policy.model
        return [
            *model.parameters(),
            *model.buffers(),
            *self.queue.tensors(),
            *(tensor for cache in self.caches for tensor in cache.tensors()),
        ]

    def release_memory(self) -> None:
        """Gives the caches' memory back until the next batch."""
        for cache in self.caches:
            cache.release_memory()

    def drop_idle_slots(self) -> bool:
        """Returns whether any slot works."""
        working = self.queue.working()
        kept = working.nonzero()
        if 0 < len(kept) <= (1 - IDLE) * len(working):
            self.queue.keep_slots(kept.squeeze(1))
            self.numbers = []
            for cache in self.caches:
                cache.keep_slots(self.queue.response)
        return len(kept) > 0


def head_logits(hidden: Tensor, head: Head, widened: Tensor | None = None) -> Tensor:
    """[R, D] -> [R, V], fp32 or fp64 whatever the precision of the policy. widened: the head's
    weight as products take it, [D, V], if it is known.
    """
    dtypes = HeadDtypes.for_hidden(hidden)
    V = len(head.weight)
    logits = hidden.new_empty_strided((len(hidden), V), (padded(V), 1), dtype=dtypes.logits)
    multiply(
        dtypes.cast(hidden), dtypes.cast(head.weight).T if widened is None else widened, out=logits
    )
    return transformed(logits, head)


# --- prompts into the cache -----------------------------------------------------------------------


class CachedRow(NamedTuple):
    """A packed row of T tokens whose keys are to be cached. The first n belong to sequences, the
    others are padding.
    """

    input_ids: Tensor  # [1, T]
    position_ids: Tensor  # [1, T]
    segments: Segments
    numbers: tuple[int, ...]  # of the sequences
    number_of_token: Tensor  # [n]


def prefill(
    policy: PackedModel,
    cache: Cache,
    prompts: Sequence[Ids],
    *,
    pad: bool,
    tokens_per_row: int = TOKENS_PER_ROW,
) -> None:
    """Puts keys and values of the prompts into the cache. pad: to a multiple of TILE."""
    cache.begin([len(ids) - 1 for ids in prompts])
    to_store = [(p, 0, ids[:-1]) for p, ids in enumerate(prompts) if len(ids) > 1]
    for row in rows_to_cache(to_store, tokens_per_row, pad, policy.model.device):
        cache.prompt_of_token = row.number_of_token
        cache.position_of_token = row.position_ids[0, : len(row.number_of_token)]
        store_keys(policy, row, cache, cache.last_layer)


class AllStoredError(Exception):
    """Ends a forward pass once the keys and values of the last layer are stored."""


class KeysOnly(NamedTuple):
    """What stores keys in a pass, which ends with those of the last layer."""

    cache: Any
    last_layer: int

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        stored = self.cache.store(layer, key, value)
        if layer == self.last_layer:
            raise AllStoredError
        return stored


def store_keys(policy: PackedModel, row: CachedRow, cache: Any, last_layer: int) -> None:
    with suppress(AllStoredError):
        keys_only: Any = KeysOnly(cache, last_layer)  # nobody asks it to attend
        policy.hidden_states(
            row.input_ids, row.position_ids, segments=row.segments, cache=keys_only
        )


def rows_to_cache(
    given: Sequence[tuple[int, int, Ids]], tokens_per_row: int, pad: bool, device: torch.device
) -> Iterator[CachedRow]:
    """Packed rows of sequences. given: each one's number, how many of its tokens are cached, and
    those that follow.
    """
    sizes = [max(len(ids), (begin + len(ids)) // KEYS_PER_TOKEN) for _, begin, ids in given]
    for members in first_fit_decreasing(sizes, tokens_per_row):
        numbers, begins, parts = zip(*(given[m] for m in members), strict=True)
        lengths = list(map(len, parts))
        key_lengths = [begin + length for begin, length in zip(begins, lengths, strict=True)]
        positions = [
            torch.arange(begin, end) for begin, end in zip(begins, key_lengths, strict=True)
        ]
        # Padding is a segment of its own, all at position 0, which every model has.
        padding = -sum(lengths) % min(tokens_per_row, TILE) if pad else 0
        if padding:
            lengths, key_lengths = [*lengths, padding], [*key_lengths, padding]
        row = CachedRow(
            joined([*parts, [0] * padding])[None],
            torch.cat([*positions, torch.zeros(padding, dtype=torch.int64)])[None],
            Segments(
                offsets(lengths), offsets(key_lengths), tuple(lengths), tuple(key_lengths), None
            ),
            numbers,
            torch.tensor(numbers).repeat_interleave(torch.tensor(list(map(len, parts)))),
        )
        yield to_device(row, device)


# --- shapes of the cache --------------------------------------------------------------------------


class LayerShapes:
    """A KeyValueCache that only notes the shapes of what it is given."""

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if key.shape != value.shape:
            raise UserError(
                f"keys {list(key.shape)} and values {list(value.shape)} of layer {layer} differ in shape"
            )
        self.shapes[layer] = LayerShape(value.shape[1], value.shape[2], value.dtype)
        return key, value

    def attend(self, *_: object, **__: object) -> Tensor:
        raise RuntimeError("there are no responses to continue")


def layer_shapes(policy: PackedModel, token: int) -> dict[int, LayerShape]:
    """Shapes of the policy's keys by layer index. token: any token of the vocabulary. Raises
    UserError if heads of values have another size than those of keys.
    """
    shapes = LayerShapes()
    (row,) = rows_to_cache([(0, 0, [token])], 1, False, policy.model.device)
    policy.hidden_states(row.input_ids, row.position_ids, segments=row.segments, cache=shapes)
    return shapes.shapes
