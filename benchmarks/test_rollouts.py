"""Rollouts by fastp3o's engine and by transformers: `generate` with its growing and its static cache, `generate_batch`.

    python -m pytest benchmarks/test_rollouts.py

All sample K responses to each of P prompts, in turns in one process. Where lengths are ragged, prompts are uniformly
from half to one and a half times their mean long, and each token ends its response with probability 1 / mean.
"""

import random
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig

from benchmarks.bare_operations import copy
from benchmarks.measure import milliseconds
from benchmarks.shapes import CUDA, DEVICE, DTYPE
from benchmarks.training_shapes import llama
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.layout import Ids
from fastp3o.rollouts.end_of_sequence import cut_after_end
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.prefill import layer_shapes
from fastp3o.rollouts.transformers_sampler import generate, sampling_mode

PROMPTS = 64 if CUDA else 32
ROUNDS = 3
# A way that takes so many times as long as `generate` has one turn only.
HOPELESS = 3
# Llama 3.2 1B; on a CPU 20 M parameters, and what the quickstart trains.
MODELS = {
    "policy": llama(2048, 8192, 16, 32, 8, 128256) if CUDA else llama(512, 1408, 4, 8, 4, 16384),
    "quickstart": llama(128, 384, 4, 4, 4, 4096),
}


class Rollouts(NamedTuple):
    """Mean tokens of a prompt, most tokens of a response and their mean: None where all have the same lengths."""

    model: str
    prompt: int
    response: int
    mean: int | None
    K: int


SHAPES = [("policy", 350, 40, None), ("policy", 128, 128, None), ("policy", 350, 128, 40), ("policy", 128, 128, 64)]
CASES = [
    *(Rollouts(*shape, K) for K in (2, 4) for shape in SHAPES),
    *(Rollouts("quickstart", *lengths, K) for K in (2, 8) for lengths in ((100, 32, None), (100, 32, 20))),
]

Sampled = list[list[Ids]]  # [P][K]


class Tokenizer:
    """Responses are only counted."""

    eos_token_id, pad_token_id = 0, 0

    def batch_decode(self, ids: list[Ids], **_: object) -> list[str]:
        return [""] * len(ids)


@pytest.fixture(scope="module")
def policies() -> dict[str, PackedModel]:
    return {name: random_policy(config) for name, config in MODELS.items()}


def random_policy(config: LlamaConfig) -> PackedModel:
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    return PackedModel(model).eval()


def random_prompts(case: Rollouts, vocabulary: int) -> list[Ids]:
    generator = random.Random(1)
    mean = case.prompt
    lengths = [mean if case.mean is None else generator.randint(mean // 2, 3 * mean // 2) for _ in range(PROMPTS)]
    return [generator.choices(range(vocabulary), k=length) for length in lengths]


def end_ids(case: Rollouts, vocabulary: int) -> set[int]:
    return {0} if case.mean is None else set(range(round(vocabulary / case.mean)))


def by_engine(policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int) -> Sampled:
    sampler = ENGINES.setdefault(
        (case.model, case.response),
        EngineSampler(policy, Tokenizer(), max_response_tokens=case.response, batch_size=PROMPTS),
    )
    return sampler([""] * PROMPTS, prompts, responses_per_prompt=case.K, seed=seed).response_ids


# Kept as in a run, whose later rollouts find what the first one prepared.
ENGINES: dict[tuple[str, int], EngineSampler] = {}


def by_generate(policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int, **settings: object) -> Sampled:
    torch.manual_seed(seed)
    ends = set(policy.model.generation_config.eos_token_id)
    with sampling_mode(policy) as model, patch(f"{generate.__module__}.GenerationConfig", settings_with(settings)):
        ids = generate(
            model,
            prompts,
            responses_per_prompt=case.K,
            max_response_tokens=case.response,
            end_ids=ends,
            pad_token_id=Tokenizer.pad_token_id,
        )
    return [ids[p * case.K : (p + 1) * case.K] for p in range(len(prompts))]


def settings_with(more: dict[str, object]) -> Callable[..., GenerationConfig]:
    return lambda **settings: GenerationConfig(**settings, **more)


def by_generate_batch(policy: PackedModel, prompts: list[Ids], case: Rollouts, seed: int) -> Sampled:
    ends = policy.model.generation_config.eos_token_id
    with sampling_mode(policy) as model:
        settings = GenerationConfig(
            do_sample=True, temperature=1.0, top_k=0, max_new_tokens=case.response, eos_token_id=ends, pad_token_id=0
        )
        repeated = [prompt for prompt in prompts for _ in range(case.K)]
        results = model.generate_batch(repeated, generation_config=settings, continuous_batching_config=pages(case))
    ids = [cut_after_end(result.generated_tokens, set(ends)) for result in results.values()]
    if len(ids) < len(repeated):
        raise RuntimeError(f"generate_batch gave {len(ids)} of {len(repeated)} responses")
    return [ids[p * case.K : (p + 1) * case.K] for p in range(len(prompts))]


def pages(case: Rollouts) -> object:
    """By itself it takes most of the memory, which on a CPU is everybody's."""
    from transformers import ContinuousBatchingConfig

    if CUDA:
        return ContinuousBatchingConfig()
    page = ContinuousBatchingConfig.page_size
    of_sequence = -(-(3 * case.prompt // 2 + case.response) // page)
    return ContinuousBatchingConfig(num_blocks=PROMPTS * case.K * of_sequence, max_batch_tokens=2048)


WAYS = {
    "generate": by_generate,
    "fastp3o engine": by_engine,
    "generate, static cache": partial(by_generate, cache_implementation="static"),
    "generate_batch": by_generate_batch,
}


def counts(way: str, prompts: list[Ids], responses: Sampled, case: Rollouts, computed: int) -> dict[str, float]:
    """Tokens computed, and cached tokens whose keys and values attention needs, by token of the responses.

    computed: what the model was given, as counted in the engine.
    """
    lengths = [[len(ids) for ids in group] for group in responses]
    tokens, longest = sum(map(sum, lengths)), max(map(max, lengths))
    if way == "fastp3o engine":
        # A prompt for as long as one of its responses goes on; own tokens up to the newest.
        read = sum((len(ids) - 1) * max(group) for ids, group in zip(prompts, lengths, strict=True))
        read += sum(length * (length + 1) // 2 for length in chain.from_iterable(lengths))
    else:
        # A rectangle, up to the longest prompt and, with a static cache, to the longest response that is possible.
        width, sequences = max(map(len, prompts)), len(prompts) * case.K
        computed = sequences * (width + longest - 1)
        static = "static" in way
        read = sum(sequences * (width + (case.response if static else step)) for step in range(1, longest))
    return {
        "tokens": tokens,
        "steps": longest,
        "computed_per_token": computed / tokens,
        "read_per_token": read / tokens,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_rollouts_of_fastp3o(benchmark, policies, case):
    """`ways`: medians of rounds in which every way has its turn. ratio: of tokens a second to those of `generate`."""
    policy = policies[case.model]
    vocabulary = policy.model.config.vocab_size
    prompts = random_prompts(case, vocabulary)
    policy.model.generation_config.eos_token_id = sorted(end_ids(case, vocabulary))
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    figures: dict[str, dict[str, object]] = {}
    hopeless: set[str] = set()

    def one_round(seed: int) -> None:
        for way, sample in WAYS.items():
            if way in hopeless:
                continue
            result: list[Sampled] = []
            try:
                with counted_tokens(policy) as computed:
                    ms = milliseconds(lambda: result.append(sample(policy, prompts, case, seed)))  # noqa: B023
            except Exception as error:
                if "fastp3o" in way:
                    raise
                reason = str(error).partition("\n")[0][:200]
                figures[way] = {"failed": f"{type(error).__name__}: {reason}"}
                hopeless.add(way)
                continue
            figures[way] = counts(way, prompts, result[0], case, sum(computed))
            times[way].append(ms)
            rates[way].append(1e3 * figures[way]["tokens"] / ms)
            if ms > HOPELESS * times["generate"][-1]:
                hopeless.add(way)

    seeds = iter(range(ROUNDS + 1))
    one_round(next(seeds))  # compiles and captures
    for way in WAYS.keys() - hopeless:
        del times[way][:], rates[way][:]
    benchmark.pedantic(lambda: one_round(next(seeds)), rounds=ROUNDS)
    bytes_per_token = sum(shape.bytes_per_token for shape in shapes_of(policy).values())
    for way, figure in figures.items():
        if "failed" in figure:
            continue
        of_generate = zip(rates[way], rates["generate"], strict=way not in hopeless)
        figure |= {
            "tokens_per_s": statistics.median(rates[way]),
            "ratio": statistics.median(rate / base for rate, base in of_generate),
            "ms": statistics.median(times[way]),
            "ms_per_step": statistics.median(times[way]) / figure["steps"],
            "bytes_read_per_token": bytes_per_token * figure["read_per_token"],
        }
    engine = figures["fastp3o engine"]
    if CUDA:
        engine["floor_ms"] = floor_ms(policy, engine)
    shape = {"D": policy.model.config.hidden_size, "V": vocabulary, "dtype": str(DTYPE).removeprefix("torch.")}
    benchmark.extra_info |= case._asdict() | shape | {"level": "rollouts", "implementation": "fastp3o", "ways": figures}


@torch.no_grad()
def shapes_of(policy: PackedModel) -> dict:
    return layer_shapes(policy, 0)


@contextmanager
def counted_tokens(policy: PackedModel) -> Iterator[list[int]]:
    """Tokens of each of the engine's rows."""
    rows: list[int] = []
    whole = policy.hidden_states

    def counting(input_ids: Tensor, *arguments: object, **options: object) -> Tensor:
        rows.append(input_ids.numel())
        return whole(input_ids, *arguments, **options)

    with patch.object(policy, "hidden_states", counting):
        yield rows


def floor_ms(policy: PackedModel, engine: dict[str, float]) -> float:
    """Of all steps: weights, and the keys and values that are read, at the bandwidth of a copy."""
    source = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    run = copy(source, torch.empty_like(source))
    run()
    bytes_per_ms = 2 * source.numel() / min(milliseconds(run) for _ in range(5))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    return (weights * engine["steps"] + engine["bytes_read_per_token"] * engine["tokens"]) / bytes_per_ms
