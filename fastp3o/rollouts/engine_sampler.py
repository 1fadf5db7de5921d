"""Responses from the engine: batches of prompts, as many at once as memory holds."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import get_logger

from fastp3o.models.packable import within_vocabulary
from fastp3o.models.packed_model import PackedModel, evaluation_mode
from fastp3o.packing.layout import Ids
from fastp3o.rollouts.end_of_sequence import end_of_sequence_ids
from fastp3o.rollouts.engine import Engine
from fastp3o.rollouts.prefill import layer_shapes
from fastp3o.rollouts.rollouts import Rollouts, decode_rollouts
from fastp3o.rollouts.room import LayerShape, Room, available_memory, fitting_room
from fastp3o.rollouts.sampling_settings import POLICY_ITSELF, SamplingSettings
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o.rollouts.trial import reason_against
from fastp3o_kernels.decoding import response_keys

logger = get_logger(__name__)

# On a GPU the room for prompts is in steps of so many tokens: batches with longest prompts of similar length share it.
PROMPT_STEP = 256


class EngineSampler:
    """A Sampler. Responses do not depend on the batch or the process that a prompt is in.

    A policy that the engine cannot decode is sampled by transformers, which is said once.

    max_response_tokens: longest response. batch_size: prompts sampled at once, with all their responses. memory: bytes
    for keys and values of prompts and responses, by default a part of what is free; where it is little, fewer prompts
    are sampled at once. compiles: whether torch compiles the policy's pass of a step. graph: whether a step may be a
    CUDA graph, as in `Engine`.
    """

    def __init__(
        self,
        policy: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_response_tokens: int,
        batch_size: int,
        memory: int | None = None,
        compiles: bool = False,
        settings: SamplingSettings = POLICY_ITSELF,
        graph: bool | None = None,
    ):
        self.policy, self.tokenizer, self.settings = policy, tokenizer, settings
        self.compiles, self.graph = compiles, graph
        self.max_response_tokens, self.batch_size, self.memory = max_response_tokens, batch_size, memory
        self.shapes: dict[int, LayerShape] = {}  # empty before the policy was tried
        self.engine: Engine | None = None
        self.in_its_place: TransformersSampler | None = None

    def __call__(
        self,
        prompts: list[str],
        prompt_ids: list[list[int]],
        numbers: Sequence[int] | None = None,
        *,
        responses_per_prompt: int,
        seed: int,
    ) -> Rollouts:
        with evaluation_mode(self.policy):
            if not self.shapes and self.in_its_place is None:
                self.try_policy()
            if self.in_its_place is not None:
                return self.in_its_place(
                    prompts, prompt_ids, numbers, responses_per_prompt=responses_per_prompt, seed=seed
                )
            end_ids = end_of_sequence_ids(self.policy.model, self.tokenizer)
            numbers = range(len(prompts)) if numbers is None else numbers
            keys = response_keys(seed, torch.tensor(numbers), responses_per_prompt)
            response_ids, logprobs = self.sample(prompt_ids, keys, end_ids)
        return decode_rollouts(self.tokenizer, end_ids, prompts, prompt_ids, response_ids, logprobs)

    def try_policy(self) -> None:
        """Finds out whether the engine decodes the policy, and shapes of its keys."""
        reason = None
        try:
            self.shapes = layer_shapes(self.policy, *within_vocabulary(self.policy.model, [3]))
        except Exception as error:  # from anywhere in a model that does not hand the cache on
            reason = f"a trial failed with: {error}"
        reason = reason or reason_against(self.policy, self.shapes)
        if reason is not None:
            name = type(self.policy.model).__name__
            logger.warning_once(f"{name} is sampled by transformers' generate, several times slower: {reason}")
            self.in_its_place = TransformersSampler(
                self.policy,
                self.tokenizer,
                max_response_tokens=self.max_response_tokens,
                batch_size=self.batch_size,
                settings=self.settings,
            )

    def sample(
        self, prompt_ids: list[Ids], keys: Tensor, end_ids: set[int]
    ) -> tuple[list[list[Ids]], list[list[list[float]]]]:
        """Token ids and log-probabilities, [P][K]. keys: [P, K], of the random numbers."""
        memory = available_memory(self.policy.model.device) if self.memory is None else self.memory
        room = self.room_for(prompt_ids, keys.shape[1], memory)
        response_ids: list[list[Ids]] = []
        logprobs: list[list[list[float]]] = []
        batches = range(0, len(prompt_ids), room.prompts)
        for first in tqdm(batches, desc="sampling", unit="batch", leave=False, disable=len(batches) < 4):
            batch = slice(first, first + room.prompts)
            ids, ids_logprobs = self.engine_with(room, end_ids, memory).run(prompt_ids[batch], keys[batch])
            response_ids += ids
            logprobs += ids_logprobs
        self.release_memory()
        return response_ids, logprobs

    def release_memory(self) -> None:
        """An engine whose shapes stay, and its graph, are of use again."""
        if self.engine is not None and self.engine.static:
            self.engine.release_memory()
        else:
            self.engine = None

    def room_for(self, prompt_ids: list[Ids], responses_per_prompt: int, memory: int) -> Room:
        device = self.policy.model.device
        longest = max(map(len, prompt_ids)) - 1
        return fitting_room(
            longest if device.type == "cpu" else -(-longest // PROMPT_STEP) * PROMPT_STEP,
            self.max_response_tokens,
            responses_per_prompt,
            prompts=min(self.batch_size, len(prompt_ids)),
            bytes_per_token=self.bytes_per_token(),
            memory=memory,
        )

    def engine_with(self, room: Room, end_ids: set[int], memory: int) -> Engine:
        """The last one where it has the room and its shapes stay, so that its graph serves again; unless it is larger
        than the memory (bytes) that is allowed by now: an optimizer takes its own after the first rollouts.
        """
        last = self.engine
        if last is None or not last.static or not last.room.holds(room) or not self.fits(last.room, room, memory):
            self.engine = None  # gives its memory back before the next one takes any
            self.engine = self.new_engine(room, end_ids)
        return cast(Engine, self.engine)

    def fits(self, larger: Room, room: Room, memory: int) -> bool:
        return larger.tokens <= max(room.tokens, memory // self.bytes_per_token())

    def new_engine(self, room: Room, end_ids: set[int]) -> Engine:
        given = self.policy, self.shapes, room, end_ids, self.settings
        return Engine(*given, graph=self.graph, compiles=self.compiles)

    def bytes_per_token(self) -> int:
        """Of keys and values."""
        return sum(shape.bytes_per_token for shape in self.shapes.values())
