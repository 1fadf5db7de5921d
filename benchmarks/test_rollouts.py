"""Rollouts by fastp3o's engine and by transformers and TRL (`rollout_ways.py`).

    python -m pytest benchmarks/test_rollouts.py

All sample K responses to each of P prompts, in turns in one process. Where lengths are ragged, prompts are uniformly
from half to one and a half times their mean long, and each token ends its response with probability 1 / mean.
"""

import heapq
import random
import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.bare_operations import copy
from benchmarks.host_work import host_work
from benchmarks.measure import milliseconds
from benchmarks.peers import AbsentError
from benchmarks.rollout_ways import END, SLOW_TO_START, WAYS, Rollouts, Sampled
from benchmarks.shapes import CUDA, DEVICE, DTYPE
from benchmarks.training_shapes import llama
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.pack import first_fit_decreasing
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.cache import MOST_SLOTS
from fastp3o.rollouts.engine import STEPS_PER_LOOK
from fastp3o.rollouts.prefill import TOKENS_PER_ROW, layer_shapes

PROMPTS = 64 if CUDA else 32
ROUNDS = 3
# Seconds of a round that only one more follows.
LONG_ROUND = 60
# A way that takes this many times as long as `generate` has one turn only.
HOPELESS = 3
# The counter of operations on a CPU sees neither into a thread of the way's own nor into compiled code.
UNSEEN_ON_CPUS = ("generate_batch", "fastp3o engine, compiled")
# Llama 3.2 1B; on a CPU 20 M parameters, and what the quickstart trains.
MODELS = {
    "policy": llama(2048, 8192, 16, 32, 8, 128256) if CUDA else llama(512, 1408, 4, 8, 4, 16384),
    "quickstart": llama(128, 384, 4, 4, 4, 4096),
}
SHAPES = [("policy", 350, 40, None), ("policy", 128, 128, None), ("policy", 350, 128, 40), ("policy", 128, 128, 64)]
CASES = [
    *(Rollouts(*shape, K) for K in (2, 4) for shape in SHAPES),
    Rollouts(*SHAPES[0], K=8),
    *(Rollouts("quickstart", *lengths, K) for K in (2, 8) for lengths in ((100, 32, None), (100, 32, 20))),
]


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
    return {END} if case.mean is None else set(range(round(vocabulary / case.mean)))


def possible_ways(case: Rollouts) -> list[str]:
    compiles = case.K == 2 and case.mean is None and (case.prompt == 350 if CUDA else case.model == "quickstart")
    # The slowest of all by far where it has no GPU.
    left_out = () if CUDA or (case.K == 2 and case.prompt < 128) else ("generate_batch",)
    return [way for way in WAYS if way not in left_out and (compiles or way not in SLOW_TO_START)]


def counts(way: str, prompts: list[Ids], responses: Sampled, case: Rollouts, computed: int | None) -> dict[str, float]:
    """Tokens computed, and cached tokens whose keys and values attention needs, by token of the responses.

    computed: what the engine gave the model; None where its shapes stay, so that it follows from the lengths.
    """
    lengths = [[len(ids) for ids in group] for group in responses]
    tokens, longest = sum(map(sum, lengths)), max(map(max, lengths))
    if "fastp3o" in way:
        slots = min(len(prompts) * case.K, MOST_SLOTS)
        longest = steps_of_slots(list(chain.from_iterable(lengths)), slots)
        if computed is None:
            rows = first_fit_decreasing([len(ids) - 1 for ids in prompts], TOKENS_PER_ROW)
            steps = -(-longest // STEPS_PER_LOOK) * STEPS_PER_LOOK
            computed = len(list(rows)) * TOKENS_PER_ROW + steps * slots
        # A prompt for as long as one of its responses goes on; own tokens up to the newest.
        read = sum((len(ids) - 1) * max(group) for ids, group in zip(prompts, lengths, strict=True))
        read += sum(length * (length + 1) // 2 for length in chain.from_iterable(lengths))
    elif way == "generate_batch":
        computed = sum(case.K * len(ids) for ids in prompts) + tokens - len(prompts) * case.K
        read = sum(
            sum(length * len(ids) + length * (length - 1) // 2 for length in group)
            for ids, group in zip(prompts, lengths, strict=True)
        )
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


def steps_of_slots(lengths: list[int], slots: int) -> int:
    """Until all responses, which slots take in this order, have ended."""
    busy_until = [0] * slots
    for length in lengths:
        heapq.heapreplace(busy_until, busy_until[0] + length)
    return max(busy_until)


class Figures:
    """Each way's times of its turns, tokens a second, and counts in its last turn, or why there are none."""

    def __init__(self, ways: list[str]):
        self.ms: dict[str, list[float]] = {way: [] for way in ways}
        self.rates: dict[str, list[float]] = {way: [] for way in ways}
        self.counts: dict[str, dict[str, float]] = {}
        self.reasons: dict[str, str] = {}

    def forget(self, way: str) -> None:
        self.ms[way].clear()
        self.rates[way].clear()

    def summary(self, way: str, bytes_per_token: int) -> dict[str, object]:
        """ratio: of tokens a second to those of `generate`, the median of rounds. bytes_per_token: of a cached one."""
        if not self.rates[way]:
            return {"absent": self.reasons[way]}
        ratios = [mine / base for mine, base in zip(self.rates[way], self.rates["generate"], strict=False)]
        counts, ms = self.counts[way], statistics.median(self.ms[way])
        return counts | {
            "tokens_per_s": statistics.median(self.rates[way]),
            "ratio": statistics.median(ratios),
            "ms": ms,
            "ms_per_step": ms / counts["steps"],
            "bytes_read_per_token": bytes_per_token * counts["read_per_token"],
            "rounds": len(ratios),
        }


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_rollouts_of_fastp3o(benchmark, policies, case):
    """`ways`: figures of rounds in which every way has its turn, and of one more that counts what the host does
    a step.
    """
    policy = policies[case.model]
    vocabulary = policy.model.config.vocab_size
    prompts = random_prompts(case, vocabulary)
    policy.model.generation_config.eos_token_id = sorted(end_ids(case, vocabulary))
    figures = Figures(possible_ways(case))
    waiting = list(figures.ms)

    def turn(way: str, seed: int) -> None:
        result: list[Sampled] = []
        with counted_tokens(policy) if way == "fastp3o engine" and not CUDA else nullcontext() as rows:
            ms = milliseconds(lambda: result.append(WAYS[way](policy, prompts, case, seed)))
        figures.counts[way] = counts(way, prompts, result[0], case, None if rows is None else sum(rows))
        figures.ms[way].append(ms)
        figures.rates[way].append(1e3 * figures.counts[way]["tokens"] / ms)

    def one_round(seed: int) -> None:
        for way in list(waiting):
            try:
                turn(way, seed)
            except Exception as error:
                if "fastp3o" in way:
                    raise
                absent = isinstance(error, ImportError | AbsentError)
                reason = str(error).partition("\n")[0][:200]
                figures.reasons[way] = reason if absent else f"{type(error).__name__}: {reason}"
                waiting.remove(way)

    seeds = iter(range(ROUNDS + 1))
    one_round(next(seeds))  # compiles and captures, and finds caches cold
    (generate_ms,) = figures.ms["generate"]
    long = sum(map(sum, figures.ms.values())) > 1e3 * LONG_ROUND
    for way in list(waiting):
        if way in SLOW_TO_START or figures.ms[way][0] < HOPELESS * generate_ms:
            figures.forget(way)
        else:
            waiting.remove(way)
    benchmark.pedantic(lambda: one_round(next(seeds)), rounds=1 if long else ROUNDS)
    for way in waiting if CUDA else [way for way in waiting if way not in UNSEEN_ON_CPUS]:
        work = host_work(lambda: WAYS[way](policy, prompts, case, 1 if long else ROUNDS))  # noqa: B023
        steps = figures.counts[way]["steps"]
        figures.counts[way] |= {f"{name}_per_step": value / steps for name, value in work.items()}
    bytes_per_token = sum(shape.bytes_per_token for shape in cache_shapes(policy).values())
    ways = {way: figures.summary(way, bytes_per_token) for way in figures.ms}
    if CUDA:
        engine = ways["fastp3o engine"]
        engine["floor_ms"] = floor_ms(policy, engine)
    shape = {"P": PROMPTS, "D": policy.model.config.hidden_size, "layers": policy.model.config.num_hidden_layers}
    shape |= {"V": vocabulary, "dtype": str(DTYPE).removeprefix("torch.")}
    benchmark.extra_info |= case._asdict() | shape | {"level": "rollouts", "implementation": "fastp3o", "ways": ways}


@torch.no_grad()
def cache_shapes(policy: PackedModel) -> dict:
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
    """Time of reading the weights, keys and values of all steps at the bandwidth of a copy."""
    source = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    run = copy(source, torch.empty_like(source))
    run()
    bytes_per_ms = 2 * source.numel() / min(milliseconds(run) for _ in range(5))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    return (weights * engine["steps"] + engine["bytes_read_per_token"] * engine["tokens"]) / bytes_per_ms
