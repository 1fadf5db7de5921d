"""Ways to sample: fastp3o's engine, transformers' `generate` and `generate_batch`, and TRL's
GRPOTrainer.

K responses to each of P prompts. A model's own end-of-sequence ids end a response.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from tempfile import gettempdir
from typing import Any, Generic, NamedTuple, TypeVar, cast
from unittest.mock import patch

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import (
    ContinuousBatchingConfig,
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from benchmarks.shapes import CUDA, LARGE
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Prompt, token_ids
from fastp3o.rollouts.transformers_sampler import cut_after_end, generate, sampling_mode

Sampled = list[list[Ids]]  # [P][K]
Made = TypeVar("Made")
# Pads, and is among the ids that end responses.
END = 0


class Rollouts(NamedTuple):
    """P prompts, their mean tokens; K responses to each, their most tokens and mean: None where
    lengths are equal.
    """

    model: str
    prompt: int
    response: int
    mean: int | None
    K: int
    P: int


Way = Callable[[PackedModel, list[Ids], Rollouts, int], Sampled]  # the last argument is the seed


class CountingTokenizer(PreTrainedTokenizerFast):
    """Responses are only counted."""

    def __init__(self) -> None:
        words, end = Tokenizer(WordLevel({"<end>": END}, unk_token="<end>")), "<end>"
        super().__init__(tokenizer_object=words, eos_token=end, pad_token=end)

    def decode(self, token_ids: object, skip_special_tokens: bool = False, **_: object) -> str:
        return ""


class Kept(Generic[Made]):
    """Objects that a way made for a policy and reuses, as later rollouts of a run do."""

    def __init__(self, make: Callable[[PackedModel, int, Rollouts], Made]):
        self.make = make
        self.made: dict[tuple[int, int, int, int], Made] = {}

    def __call__(self, policy: PackedModel, P: int, case: Rollouts) -> Made:
        # The engine's room is the same whatever K and the prompts' lengths; TRL's trainer knows K.
        key = id(policy), P, case.response, case.K
        if key not in self.made:
            self.made.clear()  # gives memory back before the next one takes any
            self.made[key] = self.make(policy, P, case)
        return self.made[key]


def engine_sampler(policy: PackedModel, P: int, case: Rollouts) -> EngineSampler:
    return EngineSampler(
        policy, CountingTokenizer(), max_response_tokens=case.response, batch_size=P
    )


ENGINE = Kept(engine_sampler)


def by_engine(policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int) -> Sampled:
    sampler = ENGINE(policy, len(prompts), case)
    given = [Prompt("", ids, number) for number, ids in enumerate(prompts)]
    return token_ids(sampler(given, case.K, seed))[1]


def by_generate(
    policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int, **settings: object
) -> Sampled:
    torch.manual_seed(seed)
    ends = set(policy.model.generation_config.eos_token_id)
    with (
        sampling_mode(policy) as model,
        patch(f"{generate.__module__}.GenerationConfig", settings_with(settings)),
    ):
        ids = generate(
            model,
            prompts,
            responses_per_prompt=case.K,
            max_response_tokens=case.response,
            end_ids=ends,
            pad_token_id=END,
        )
    return grouped(ids, prompts, case)


def settings_with(more: dict[str, object]) -> Callable[..., GenerationConfig]:
    return lambda **settings: GenerationConfig(**settings, **more)


class Batches:
    """`generate_batch`. Its manager, with a cache and CUDA graphs, stays for all calls of a case,
    as in a server.
    """

    def __init__(self):
        self.latest: tuple[PackedModel, Rollouts] | None = None

    def __call__(
        self, policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int
    ) -> Sampled:
        if self.latest != (policy, case):
            # The manager's room and ends are those of its first call.
            if self.latest:
                generator(self.latest[0].model).destroy_cached_continuous_batching_manager()
            self.latest = policy, case
        return by_generate_batch(policy, prompts, case)


def by_generate_batch(policy: PackedModel, prompts: list[Ids], case: Rollouts) -> Sampled:
    """The manager has a generator of its own, which no seed reaches."""
    ends = policy.model.generation_config.eos_token_id
    with sampling_mode(policy) as model:
        settings = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=case.response,
            eos_token_id=ends,
            pad_token_id=END,
        )
        results = generator(model).generate_batch(
            repeated(prompts, case),
            generation_config=settings,
            continuous_batching_config=pages(prompts, case),
            persistent_manager=True,
        )
    return grouped(
        [cut_after_end(result.generated_tokens, set(ends)) for result in results.values()],
        prompts,
        case,
    )


def generator(model: PreTrainedModel) -> GenerationMixin:
    """A causal LM as what generates, which each of its classes is and their common one is not."""
    return cast(GenerationMixin, model)


def pages(prompts: list[Ids], case: Rollouts) -> ContinuousBatchingConfig:
    """Room for all responses at once. The default takes most of the memory, which the ways in turns
    with it need.
    """
    defaults = ContinuousBatchingConfig()
    # In 5.17 it has the name block_size.
    page = defaults.page_size if hasattr(defaults, "page_size") else defaults.block_size
    assert page is not None
    sequence_pages = -(-(max(map(len, prompts)) + case.response) // page)
    return ContinuousBatchingConfig(
        num_blocks=len(prompts) * case.K * sequence_pages,
        max_batch_tokens=defaults.max_batch_tokens if CUDA else 2048,
    )


def grpo_trainer(policy: PackedModel, P: int, case: Rollouts) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"w0": END}, unk_token="w0")),
        eos_token="w0",
        pad_token="w0",
    )
    settings = GRPOConfig(
        output_dir=gettempdir(),
        num_generations=case.K,
        max_completion_length=case.response,
        per_device_train_batch_size=P * case.K,
        temperature=1.0,
        beta=0.0,
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=not CUDA,
        report_to="none",
    )
    with sampling_mode(policy) as model:
        # Of weights alone: a model keeps the manager of `generate_batch`, which cannot be copied.
        copied = cast(nn.Module, type(model)(deepcopy(model.config)))
        copied.to(model.device, model.dtype)
        copied.load_state_dict(model.state_dict())
    return GRPOTrainer(
        copied,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": ["w0"] * P}),
        processing_class=tokenizer,
    )


GRPO_TRAINER = Kept(grpo_trainer)


def by_trl(policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int) -> Sampled:
    """GRPOTrainer's call, with each prompt K times, from token ids to token ids."""
    trainer = GRPO_TRAINER(policy, len(prompts), case)
    trainer.eos_token_ids = trainer.generation_config.eos_token_id = (
        policy.model.generation_config.eos_token_id
    )
    torch.manual_seed(seed)
    ids, _ = trainer._generate_single_turn(repeated(prompts, case), None, {}, case.K)
    return grouped(ids, prompts, case)


def repeated(prompts: list[Ids], case: Rollouts) -> list[Ids]:
    return [prompt for prompt in prompts for _ in range(case.K)]


def grouped(ids: list[Ids], prompts: list[Ids], case: Rollouts) -> Sampled:
    """Raises RuntimeError where responses are missing."""
    if len(ids) != len(prompts) * case.K:
        raise RuntimeError(f"{len(ids)} of {len(prompts) * case.K} responses came")
    return [ids[p * case.K : (p + 1) * case.K] for p in range(len(prompts))]


# All are compared with the first.
WAYS: dict[str, Way] = {
    "generate": by_generate,
    "fastp3o engine": by_engine,
    "generate, static cache": partial(by_generate, cache_implementation="static"),
    "generate_batch": Batches(),
    "TRL GRPO": by_trl,
}
# It compiles for each shape.
SLOW_TO_START = {"generate, static cache"} if LARGE else set()
