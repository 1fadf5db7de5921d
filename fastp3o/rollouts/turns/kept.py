"""Turns by an engine that keeps keys and values between them: each computes its own tokens and an
observation.

Each trajectory has a slot of its own until all are over. Observations come into the cache in packed
rows: a token attends to the keys of the prompt, to the slot's own ones, and to its observation up
to itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fastp3o.models.packed_model import evaluation_mode
from fastp3o.packing.packed_row import Ids, to_device
from fastp3o.rollouts.cache import Cache, Room, available_memory
from fastp3o.rollouts.engine import Engine, rows_to_cache, store_keys
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, Prompt, Response, Sampler
from fastp3o.rollouts.queue import NO_TOKEN, Queue
from fastp3o_kernels.decoding import response_keys

# What continues trajectories, by number p K + k: how many tokens of prompt and trajectory are in
# the cache, and those that follow them, the last turn's last one and the observation.
Continued = Mapping[int, tuple[int, Ids]]


class KeptQueue(Queue):
    """A Queue of turns, of turn_tokens at most. room: of whole trajectories, with a slot for each.
    seen: [N + 1] int64, own tokens in the cache before the turn.
    """

    def __init__(self, room: Room, turn_tokens: int, end_ids: set[int], device: torch.device):
        super().__init__(room._replace(response_tokens=turn_tokens), end_ids, device)
        self.last_place = room.response_tokens - 1
        self.seen = torch.full_like(self.first_tokens, self.last_place)

    def fill(self, prompts: Sequence[Ids], keys: Tensor) -> None:
        super().fill(prompts, keys)
        self.prompt_lengths = [len(ids) - 1 for ids in prompts]
        self.seen[:-1] = 0

    def go_on(self, given: Continued, keys: Tensor) -> None:
        """Begins a turn. keys: [n] int64, of the random numbers."""
        K, N = self.room.responses_per_prompt, self.room.responses
        # By trajectory that goes on: its tokens in the cache before the turn, and the turn's input.
        seen, inputs = [], []
        for number, (begin, ids) in given.items():
            seen.append(begin + len(ids) - 1 - self.prompt_lengths[number // K])
            inputs.append(ids[-1])
        self.most_own_tokens = max(seen)
        # Slot n works on trajectory n, or on none if that is over.
        by_slot = [number if number in given else N for number in range(N)]

        # One copy to the device, for all of them.
        lists = map(torch.tensor, (list(given), by_slot, inputs, seen))
        numbers, response, first_tokens, own_tokens, keys = to_device(
            (*lists, keys), self.by_slot.device
        )
        self.first_tokens[numbers] = first_tokens
        self.seen[numbers] = own_tokens
        self.keys[numbers] = keys
        self.response, self.steps, self.tokens = self.by_slot
        self.response.copy_(response)
        self.steps.zero_()
        self.tokens.copy_(self.first_tokens[response])
        self.sampled.fill_(NO_TOKEN)

    def own_tokens(self) -> Tensor:
        # Idle slots write at the last place, which only the last token of a full trajectory reads;
        # more is cut.
        return (self.seen[self.response] + self.steps).clamp(max=self.last_place)


class Observed(NamedTuple):
    """A KeyValueCache for a row of observations, whose tokens go to these places; further ones are
    padding. segments: of each observation, its prompt and what is cached of it, its slot and that
    one's own tokens in the end.
    """

    cache: Cache
    slot_of_token: Tensor
    step_of_token: Tensor
    segments: list[tuple[int, int, int, int]]

    def store(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Returns copies of the keys of all segments, which any backend of attention takes."""
        n, copies = len(self.slot_of_token), []
        self.cache.store_own(layer, self.slot_of_token, self.step_of_token, key[:n], value[:n])
        segments = [self.cache.cached(layer, *segment) for segment in self.segments]
        for new, pairs in zip((key, value), zip(*segments, strict=True), strict=True):
            parts = [part for pair in pairs for part in pair]
            parts.append(new[n:].transpose(0, 1).to(parts[0].dtype))
            copies.append(torch.cat(parts, dim=1).transpose(0, 1).to(new.dtype))
        keys, values = copies
        return keys, values


class KeptEngine(Engine):
    """An Engine of turns of turn_tokens at most. room: as a KeptQueue's. Further arguments are an
    Engine's.
    """

    queue: KeptQueue

    def __init__(self, turn_tokens: int, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.queue = KeptQueue(self.room, turn_tokens, self.queue.end_ids, self.policy.model.device)

    def go_on(self, given: Continued, keys: Tensor) -> tuple[list[Ids], list[list[float]]]:
        """The next turns, in the order of `given`, and their log-probabilities. keys: [n] int64."""
        with self.without_gradients():
            queue = self.queue
            K = self.room.responses_per_prompt
            lengths = self.queue.prompt_lengths
            queue.go_on(given, keys)
            observed = [
                (n, given[n][0], given[n][1][:-1]) for n in sorted(given) if len(given[n][1]) > 1
            ]
            prompt_lengths = queue.slots().prompt_lengths
            for row in rows_to_cache(
                observed, self.tokens_per_row, self.static, prompt_lengths.device
            ):
                slots = row.number_of_token
                steps = row.position_ids[0, : len(slots)] - prompt_lengths[slots]
                ends = zip(row.numbers, row.segments.key_lengths, strict=False)  # padding has none
                segments = [(n // K, lengths[n // K], n, end - lengths[n // K]) for n, end in ends]
                store_keys(
                    self.policy,
                    row,
                    Observed(self.cache, slots, steps, segments),
                    self.cache.last_layer,
                )
            if not self.static:
                self.cache.keep_slots(torch.arange(self.room.slots))
                self.drop_idle_slots()
            self.decode()
            ids, logprobs = queue.results(len(lengths))
            return [ids[n // K][n % K] for n in given], [logprobs[n // K][n % K] for n in given]


class KeptTurns(EngineSampler):
    """A TrajectorySampler's first sampler; `go_on` is its further one. Until `end` weights must
    stay. first, further: those without kept keys, which give the same tokens up to rounding. They
    serve where trajectories do not all fit at once, by memory, slots or batch size. longest: tokens
    of a trajectory.
    """

    def __init__(self, first: EngineSampler, further: Sampler, longest: int):
        tokenizer = first.ends.continuation.tokenizer
        settings = first.settings
        size = first.batch_size
        limits: dict[str, Any] = {
            "max_response_tokens": longest,
            "batch_size": size,
            "memory": first.memory,
        }
        super().__init__(first.policy, tokenizer, settings=settings, **limits)
        self.first, self.further = first, further
        # By a trajectory's number: its number in the engine, and its tokens in the cache. Empty if
        # not all fit.
        self.cached: dict[int, tuple[int, int]] = {}

    def sample(self, prompts: list[Prompt], keys: Tensor) -> list[Group]:
        P, K = keys.shape
        memory = available_memory(self.policy.model.device) if self.memory is None else self.memory
        room = self.room_for(prompts, K, memory)
        if room.prompts < P or room.slots < P * K:
            self.first.shapes = self.shapes
            return self.first.sample(prompts, keys)
        ids, logprobs = self.engine_with(room, self.ends.ids, memory).run(
            [prompt.ids for prompt in prompts], keys
        )
        groups = [
            Group(prompt, list(self.ends.responses(ids[p], logprobs[p], prompts=[prompt] * K)))
            for p, prompt in enumerate(prompts)
        ]
        contexts = [
            prompt._replace(number=prompt.number * K + k) for prompt in prompts for k in range(K)
        ]
        self.note(
            range(P * K), contexts, [response for group in groups for response in group.responses]
        )
        return groups

    def go_on(self, contexts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        if not self.cached:
            return self.further(contexts, responses_per_prompt, seed)
        places = [(*self.cached[context.number], context) for context in contexts]
        continued = {n: (begin, context.ids[begin:]) for n, begin, context in places}
        keys = response_keys(seed, torch.tensor([context.number for context in contexts]), 1)[:, 0]
        with evaluation_mode(self.policy):
            responses = list(
                self.ends.responses(
                    *cast(KeptEngine, self.engine).go_on(continued, keys), prompts=contexts
                )
            )
        self.note(continued, contexts, responses)
        return [
            Group(context, [response])
            for context, response in zip(contexts, responses, strict=True)
        ]

    def note(self, numbers: Iterable[int], contexts: list[Prompt], turns: list[Response]) -> None:
        # A turn's last token is the first input of the next one.
        zipped = zip(numbers, contexts, turns, strict=True)
        self.cached = {
            context.number: (n, len(context.ids) + len(turn.ids) - 1) for n, context, turn in zipped
        }

    def end(self) -> None:
        self.cached = {}
        self.release_memory()

    def new_engine(self, room: Room, end_ids: set[int]) -> KeptEngine:
        return KeptEngine(
            self.first.max_response_tokens, self.policy, self.shapes, room, end_ids, self.settings
        )
