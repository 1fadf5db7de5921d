"""Rollouts by fastp3o's engine and by transformers and TRL (`rollout_ways.py`).

    python -m pytest benchmarks/test_rollouts.py

All sample K responses to each of P prompts, each way in turns with `generate` in one process. Where
lengths are ragged, prompts are uniformly from half to one and a half times their mean long, and
each token ends its response with probability 1 / mean.
"""

import heapq
import random
import statistics
from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain, count

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, PretrainedConfig

from benchmarks.bare_operations import copy
from benchmarks.host_work import host_work
from benchmarks.measure import milliseconds
from benchmarks.peers import AbsentError
from benchmarks.recording import device_is_lost
from benchmarks.rollout_ways import END, SLOW_TO_START, WAYS, Rollouts, Sampled
from benchmarks.shapes import CUDA, DEVICE, DTYPE, LARGE, TRIAL, dtype_name, typed
from benchmarks.training_shapes import TINY, llama
from fastp3o.models.packed_model import PackedModel
from fastp3o.packing.packed_row import Ids
from fastp3o.rollouts.cache import MOST_SLOTS
from fastp3o.rollouts.engine import layer_shapes

PROMPTS = 64 if LARGE else 2 if TRIAL else 32
ROUNDS = 1 if TRIAL else 3
# Seconds of a round that only one more follows, and of one that five times as many follow.
LONG_ROUND, SHORT_ROUND = 60, 1
# A way whose first turn takes this many times as long as `generate` has one more only.
HOPELESS = 3
# The counter of operations on a CPU does not see into a thread of the way's own.
UNSEEN_ON_CPUS = ("generate_batch",)
# Llama 3.2 1B; on a CPU 20 M parameters. What the quickstart trains, 1.4 M, and the same as a
# GPT-2; 0.15 M.
MODELS: dict[str, PretrainedConfig] = {
    "policy": llama(2048, 8192, 16, 32, 8, 128256) if LARGE else llama(512, 1408, 4, 8, 4, 16384),
    "quickstart": llama(128, 384, 4, 4, 4, 4096),
}
if not LARGE:
    MODELS["policy, bf16"] = deepcopy(MODELS["policy"])
    MODELS["policy, bf16"].dtype = torch.bfloat16
    MODELS["GPT-2"] = GPT2Config(
        n_embd=128,
        n_layer=4,
        n_head=4,
        vocab_size=4096,
        n_positions=512,
        bos_token_id=END,
        eos_token_id=END,
    )
    MODELS["tiny"] = llama(64, 128, 2, 2, 2, 512)
if TRIAL:
    # Two policies must not share a configuration.
    MODELS = {name: deepcopy(TINY) for name in MODELS}
# The model, tokens of a prompt, tokens of a response at most and their mean: arguments of Rollouts.
Shape = tuple[str, int, int, int | None]
SHAPES: list[Shape] = [
    ("policy", 350, 40, None),
    ("policy", 128, 128, None),
    ("policy", 350, 128, 40),
    ("policy", 128, 128, 64),
]
SMALL_SHAPES: list[Shape] = [("quickstart", 100, 32, None), ("quickstart", 100, 32, 20)]
CASES = [
    *(Rollouts(*shape, K, PROMPTS) for K in (2, 4) for shape in SHAPES),
    Rollouts(*SHAPES[0], 8, PROMPTS),
    *(Rollouts(*shape, K, PROMPTS) for K in (2, 8) for shape in SMALL_SHAPES),
]
if not LARGE:
    # Few prompts and many, short ones and long, even and ragged.
    CASES = [
        Rollouts("policy", 350, 40, None, 2, 32),
        Rollouts("policy", 350, 128, 40, 2, 32),
        *(Rollouts(model, 60, 16, None, 4, 8) for model in ("policy", "policy, bf16")),
        Rollouts("quickstart", 20, 16, None, 2, 2),
        Rollouts("quickstart", 40, 16, None, 2, 4),
        Rollouts("quickstart", 100, 32, None, 2, 8),
        Rollouts("quickstart", 100, 32, None, 2, 32),
        *(Rollouts("quickstart", 100, 32, 20, K, P) for K, P in ((2, 32), (4, 32), (8, 8))),
        Rollouts("quickstart", 350, 40, None, 4, 8),
        Rollouts("quickstart", 400, 64, None, 16, 4),
        Rollouts("GPT-2", 60, 32, 20, 4, 8),
        *(Rollouts("tiny", 20, response, None, 2, 8) for response in (64, 256)),
    ]
if TRIAL:
    CASES = [Rollouts("policy", 9, 4, None, 2, PROMPTS)]


@pytest.fixture(scope="module")
def policies() -> dict[str, PackedModel]:
    return {name: random_policy(config) for name, config in MODELS.items()}


def random_policy(config: PretrainedConfig) -> PackedModel:
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or DTYPE)
    return PackedModel(model).eval()


def random_prompts(case: Rollouts, vocabulary: int) -> list[Ids]:
    generator = random.Random(1)
    mean = case.prompt
    lengths = [
        mean if case.mean is None else generator.randint(mean // 2, 3 * mean // 2)
        for _ in range(case.P)
    ]
    return [generator.choices(range(vocabulary), k=length) for length in lengths]


def end_ids(case: Rollouts, vocabulary: int) -> set[int]:
    return {END} if case.mean is None else set(range(round(vocabulary / case.mean)))


def possible_ways(case: Rollouts) -> list[str]:
    compiles = case.K == 2 and case.mean is None and case.prompt == 350
    # The slowest of all by far where it has no GPU.
    left_out = set() if CUDA or (case.K == 2 and case.P < 8) else {"generate_batch"}
    if not CUDA and case.model != "quickstart":
        left_out |= {"generate, static cache", "TRL GRPO"}
    return [way for way in WAYS if way not in left_out and (compiles or way not in SLOW_TO_START)]


def counts(way: str, prompts: list[Ids], responses: Sampled, case: Rollouts) -> dict[str, float]:
    """Tokens of the responses and steps; of the engine also cached tokens that attention needs, by
    token.
    """
    lengths = [[len(ids) for ids in group] for group in responses]
    tokens, longest = sum(map(sum, lengths)), max(map(max, lengths))
    if "fastp3o" not in way:
        return {"tokens": tokens, "steps": longest}
    # A prompt for as long as one of its responses goes on; own tokens up to the newest.
    read = sum((len(ids) - 1) * max(group) for ids, group in zip(prompts, lengths, strict=True))
    read += sum(length * (length + 1) // 2 for length in chain.from_iterable(lengths))
    steps = steps_of_slots(
        list(chain.from_iterable(lengths)), min(len(prompts) * case.K, MOST_SLOTS)
    )
    return {"tokens": tokens, "steps": steps, "read_per_token": read / tokens}


def steps_of_slots(lengths: list[int], slots: int) -> int:
    """Until all responses, which slots take in this order, have ended."""
    busy_until = [0] * slots
    for length in lengths:
        heapq.heapreplace(busy_until, busy_until[0] + length)
    return max(busy_until)


class Figures:
    """Each way's times of its turns, tokens a second, and counts in its last turn."""

    def __init__(self, ways: list[str]):
        self.ms: dict[str, list[float]] = {way: [] for way in ways}
        self.rates: dict[str, list[float]] = {way: [] for way in ways}
        self.counts: dict[str, dict[str, float]] = {}

    def forget(self, way: str) -> None:
        self.ms[way].clear()
        self.rates[way].clear()

    def summary(self, way: str, bytes_per_token: int) -> dict[str, float]:
        """ratio: of tokens a second to those of `generate`, the median of rounds. bytes_per_token:
        of a cached one.
        """
        ratios = [
            mine / base for mine, base in zip(self.rates[way], self.rates["generate"], strict=False)
        ]
        counts, ms = self.counts[way], statistics.median(self.ms[way])
        if "read_per_token" in counts:
            counts |= {"bytes_read_per_token": bytes_per_token * counts["read_per_token"]}
        return counts | {
            "tokens_per_s": statistics.median(self.rates[way]),
            "ratio": statistics.median(ratios),
            "ms": ms,
            "ms_per_step": ms / counts["steps"],
            "rounds": len(ratios),
        }


class Measurement:
    """Turns of a way and of `generate` in a case."""

    def __init__(self, policy: PackedModel, case: Rollouts, way: str):
        self.policy, self.case, self.way = policy, case, way
        self.vocabulary = policy.model.config.vocab_size
        self.prompts = random_prompts(case, self.vocabulary)
        policy.model.generation_config.eos_token_id = sorted(end_ids(case, self.vocabulary))
        self.figures = Figures([way, "generate"])

    def turn(self, way: str, seed: int) -> None:
        policy, prompts, case, figures = self.policy, self.prompts, self.case, self.figures
        result: list[Sampled] = []
        ms = milliseconds(lambda: result.append(WAYS[way](policy, prompts, case, seed)))
        figures.counts[way] = counts(way, prompts, result[0], case)
        figures.ms[way].append(ms)
        figures.rates[way].append(1e3 * figures.counts[way]["tokens"] / ms)

    def one_round(self, seed: int) -> None:
        for way in self.figures.ms:
            self.turn(way, seed)

    def run(self, benchmark) -> None:
        """The first round compiles, captures and makes room, and finds caches cold: it never
        counts.
        """
        seeds = count()
        self.one_round(next(seeds))
        way_ms, generate_ms = (self.figures.ms[way][0] for way in (self.way, "generate"))
        seconds = (way_ms + generate_ms) / 1e3
        hopeless = self.way not in SLOW_TO_START and way_ms > HOPELESS * generate_ms
        rounds = (
            1
            if hopeless or seconds > LONG_ROUND
            else ROUNDS
            if seconds > SHORT_ROUND
            else 5 * ROUNDS
        )
        for way in self.figures.ms:
            self.figures.forget(way)
        benchmark.pedantic(lambda: self.one_round(next(seeds)), rounds=rounds)

    def count_host_work(self, way: str) -> None:
        # Interpreted kernels are Python to torch's profiler, and so many events that it takes long.
        if TRIAL or (way in UNSEEN_ON_CPUS and not CUDA):
            return
        work = host_work(lambda: WAYS[way](self.policy, self.prompts, self.case, ROUNDS))
        steps = self.figures.counts[way]["steps"]
        self.figures.counts[way] |= {
            f"{name}_per_step": value / steps for name, value in work.items()
        }

    def summary(self, way: str) -> dict[str, float]:
        """Figures of a way."""
        bytes_per_token = sum(shape.bytes_per_token for shape in cache_shapes(self.policy).values())
        return self.figures.summary(way, bytes_per_token)

    def record(self, ways: Mapping[str, Mapping[str, object]]) -> dict[str, object]:
        """The case with the figures of some ways, or why they have none."""
        config = self.policy.model.config
        shape = {"D": config.hidden_size, "layers": config.num_hidden_layers, "V": self.vocabulary}
        shape["dtype"] = dtype_name(self.policy.model.dtype)
        return (
            self.case._asdict()
            | shape
            | {"level": "rollouts", "implementation": "fastp3o", "ways": ways}
        )


def cases_and_ways(ours: bool) -> list:
    """Each way in the cases that it can do; fastp3o's engine comes with `generate`, which all are
    compared with.
    """
    return [
        pytest.param(case, way, id=typed((*case, way)))
        for case in CASES
        for way in possible_ways(case)
        if way != "generate" and ours == ("fastp3o" in way)
    ]


@pytest.mark.parametrize(("case", "way"), cases_and_ways(ours=True))
def test_rollouts_of_fastp3o(benchmark, policies, case, way):
    """`ways`: figures of rounds in which both ways have their turn, and of one more that counts
    what the host does a step.
    """
    policy = policies[case.model]
    measurement = Measurement(policy, case, way)
    measurement.run(benchmark)
    for each in ("generate", way):
        measurement.count_host_work(each)
    found = {each: measurement.summary(each) for each in ("generate", way)}
    if CUDA:
        found[way] |= floor(policy, found[way], [len(ids) - 1 for ids in measurement.prompts])
    benchmark.extra_info |= measurement.record(found)


@pytest.mark.parametrize(("case", "way"), cases_and_ways(ours=False))
def test_rollouts_of_peers(benchmark, policies, case, way):
    measurement = Measurement(policies[case.model], case, way)
    try:
        measurement.run(benchmark)
        measurement.count_host_work(way)
        benchmark.extra_info |= measurement.record({way: measurement.summary(way)})
    except Exception as error:
        if device_is_lost():
            raise
        absent = isinstance(error, ImportError | AbsentError)
        reason = ("" if absent else f"{type(error).__name__}: ") + str(error).partition("\n")[0][
            :200
        ]
        benchmark.extra_info |= measurement.record({way: {"absent": reason}})


@torch.no_grad()
def cache_shapes(policy: PackedModel) -> dict:
    return layer_shapes(policy, 0)


def floor(
    policy: PackedModel, engine: dict[str, float], prompt_lengths: list[int]
) -> dict[str, float]:
    """Milliseconds that a rollout takes at least. prefill: operations of the prompts at the rate of
    a large product. decode: bytes of the weights, keys and values of all steps at the bandwidth of
    a copy. prompt_lengths: tokens that are computed before the first step.
    """
    source = torch.empty(2**28 if LARGE else 2**20, dtype=torch.uint8, device=DEVICE)
    bytes_per_ms = 2 * source.numel() / fastest_ms(copy(source, torch.empty_like(source)))
    size = 8192 if LARGE else 256
    square = torch.randn(size, size, device=DEVICE, dtype=DTYPE)
    operations_per_ms = 2 * size**3 / fastest_ms(lambda: torch.mm(square, square))
    weights = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    prefill = prefill_operations(policy, prompt_lengths) / operations_per_ms
    decode = (
        weights * engine["steps"] + engine["bytes_read_per_token"] * engine["tokens"]
    ) / bytes_per_ms
    return {"floor_ms": prefill + decode, "floor_prefill_ms": prefill, "floor_decode_ms": decode}


def fastest_ms(run: Callable[[], object]) -> float:
    run()
    return min(milliseconds(run, queued=True) for _ in range(5))


def prefill_operations(policy: PackedModel, lengths: list[int]) -> float:
    """Floating-point operations of the layers for prompts of these lengths: products with the
    weights, and attention of each token to those up to it. The head has no part.
    """
    config = policy.model.config
    embeddings = {
        id(module.weight) for module in (policy.model.get_input_embeddings(), policy.head())
    }
    weights = sum(
        parameter.numel() for parameter in policy.parameters() if id(parameter) not in embeddings
    )
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * heads
    return sum(2 * weights * length + attention * length * (length + 1) / 2 for length in lengths)
