"""Responses from the engine: as many prompts at once as memory holds."""

from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from fastp3o.config import SamplerConfig
from fastp3o.errors import UserError
from fastp3o.models.packable import (
    PROMPTS,
    logprob_tolerance,
    require_finite_logprobs,
    within_vocabulary,
)
from fastp3o.models.packed_model import PackedModel, evaluation_mode, labeled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.bundled_cache import prompt_copies
from fastp3o.rollouts.cache import (
    MOST_SLOTS,
    LayerShape,
    Room,
    available_memory,
    fitting_room,
    return_unused_memory,
)
from fastp3o.rollouts.engine import Engine, layer_shapes
from fastp3o.rollouts.groups import (
    POLICY_ITSELF,
    Ends,
    Group,
    Prompt,
    Sampler,
    SamplingSettings,
    sampling_settings,
)
from fastp3o.rollouts.transformers_sampler import TransformersSampler
from fastp3o_kernels.decoding import response_keys

# On a GPU the room for prompts grows in steps of this many tokens: batches with similar longest
# prompts share it.
PROMPT_STEP = 256
# Room of the trial: two responses share a prompt.
TRIAL_ROOM = Room(prompts=2, prompt_tokens=3, responses_per_prompt=2, slots=4, response_tokens=5)


class EngineSampler:
    """A Sampler. Responses do not depend on the batch or the process that a prompt is in, in half
    precision on a CPU up to rounding.

    The first call raises UserError for a policy that the engine cannot decode. max_response_tokens:
    longest response. batch_size: prompts sampled at once, with all their responses. memory: bytes
    for keys and values of prompts and responses, by default a part of free memory; with less, fewer
    prompts are sampled at once.
    """

    def __init__(
        self,
        policy: PackedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_response_tokens: int,
        batch_size: int,
        memory: int | None = None,
        settings: SamplingSettings = POLICY_ITSELF,
    ):
        self.policy = policy
        self.settings = settings
        self.ends = Ends(policy.model, tokenizer, settings.stops)
        self.max_response_tokens = max_response_tokens
        self.batch_size = batch_size
        self.memory = memory
        self.shapes: dict[int, LayerShape] = {}  # empty until the policy is tried
        self.engine: Engine | None = None

    def __call__(self, prompts: list[Prompt], responses_per_prompt: int, seed: int) -> list[Group]:
        with evaluation_mode(self.policy):
            if not self.shapes:
                self.try_policy()
            keys = response_keys(
                seed, torch.tensor([prompt.number for prompt in prompts]), responses_per_prompt
            )
            return self.sample(prompts, keys)

    def try_policy(self) -> None:
        self.shapes = decodable_shapes(self.policy)

    def sample(self, prompts: list[Prompt], keys: Tensor) -> list[Group]:
        """keys: [P, K] int64, of the random numbers."""
        memory = available_memory(self.policy.model.device) if self.memory is None else self.memory
        room = self.room_for(prompts, keys.shape[1], memory)
        groups: list[Group] = []
        batches = range(0, len(prompts), room.prompts)
        for first in tqdm(
            batches, desc="sampling", unit="batch", leave=False, disable=len(batches) < 4 or None
        ):
            batch = prompts[first : first + room.prompts]
            engine = self.engine_with(room, self.ends.ids, memory)
            sampled = engine.run(
                [prompt.ids for prompt in batch], keys[first : first + room.prompts]
            )
            for prompt, ids, logprobs in zip(batch, *sampled, strict=True):
                groups.append(
                    Group(
                        prompt,
                        list(self.ends.responses(ids, logprobs, prompts=[prompt] * len(ids))),
                    )
                )
        self.release_memory()
        return groups

    def release_memory(self) -> None:
        """Keeps an engine whose shapes stay, and its graph, for the next call, but not its cache's
        memory.
        """
        if self.engine is not None and self.engine.static:
            self.engine.release_memory()
        else:
            self.engine = None
        return_unused_memory(self.policy.model.device)

    def room_for(self, prompts: list[Prompt], responses_per_prompt: int, memory: int) -> Room:
        longest, most, copies = max(len(prompt.ids) for prompt in prompts) - 1, len(prompts), 1
        if self.policy.model.device.type == "cpu":
            # Each response has a slot of its own.
            most = min(most, max(MOST_SLOTS // responses_per_prompt, 1))
            copies = prompt_copies(longest, self.max_response_tokens, responses_per_prompt)
        else:
            longest = -(-longest // PROMPT_STEP) * PROMPT_STEP
        return fitting_room(
            longest,
            self.max_response_tokens,
            responses_per_prompt,
            prompts=min(self.batch_size, most),
            bytes_per_token=self.bytes_per_token(),
            memory=memory,
            prompt_copies=copies,
        )

    def engine_with(self, room: Room, end_ids: set[int], memory: int) -> Engine:
        """The last engine, so that its graph serves again, if its shapes stay and it has the room;
        but not if it takes more than the memory (bytes) allowed now: an optimizer takes its own
        after the first rollouts.
        """
        last, most_tokens = self.engine, max(room.tokens, memory // self.bytes_per_token())
        if (
            last is None
            or not last.static
            or not last.room.holds(room)
            or last.room.tokens > most_tokens
        ):
            self.engine = None  # gives its memory back before the next one takes any
            self.engine = self.new_engine(room, end_ids)
        return cast(Engine, self.engine)

    def new_engine(self, room: Room, end_ids: set[int]) -> Engine:
        return Engine(self.policy, self.shapes, room, end_ids, self.settings)

    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(shape.bytes_per_token for shape in self.shapes.values())


@torch.no_grad()
def decodable_shapes(policy: PackedModel) -> dict[int, LayerShape]:
    """Shapes of the policy's keys by layer index. Raises UserError if the engine must not sample
    from it: the log-probabilities of a few short responses must be those of the policy's own
    distribution.
    """
    name = type(policy.model).__name__
    refused = f"the engine cannot decode {name}; --sampler transformers can, more slowly: "
    prompts = [within_vocabulary(policy.model, ids) for ids in PROMPTS]
    require_finite_logprobs(policy, name)
    try:
        shapes = layer_shapes(policy, *within_vocabulary(policy.model, [3]))
        engine = Engine(policy, shapes, TRIAL_ROOM, end_ids=set(), graph=False)
        responses, logprobs = engine.run(prompts, response_keys(0, torch.arange(2), 2))
    except Exception as error:  # from anywhere in a model that does not hand the cache on
        raise UserError(f"{refused}a trial failed with: {error}") from error
    (row,) = pack(prompts, responses, Packing(tokens_per_row=100))
    expected = labeled_logprobs(policy, row.to(policy.model.device))
    got = torch.tensor(
        [logprob for g in row.groups for response in logprobs[g] for logprob in response]
    )
    difference = (got.to(expected) - expected).abs().mean().item()
    if not isfinite(difference):
        raise UserError(
            f"{refused}its log-probabilities are NaN or infinite, those of a packed row are not"
        )
    if difference > logprob_tolerance(policy, policy.model.dtype):
        off = f"(off by {difference:.2g} on average)"
        raise UserError(
            f"{refused}its tokens have other log-probabilities than in a packed row {off}"
        )
    return shapes


def named_sampler(
    config: SamplerConfig,
    policy: PackedModel,
    tokenizer: PreTrainedTokenizerBase,
    settings: SamplingSettings | None = None,
    **options: Any,
) -> Sampler:
    """The sampler of this process that the configuration names. settings: by default the
    configuration's. options: an EngineSampler's, but for its memory.
    """
    options["settings"] = settings or sampling_settings(config)
    if config.sampler == "transformers":
        return TransformersSampler(policy, tokenizer, **options)
    return EngineSampler(policy, tokenizer, memory=rollout_bytes(config), **options)


def rollout_bytes(config: SamplerConfig) -> int | None:
    return None if config.rollout_memory is None else round(1e9 * config.rollout_memory)
