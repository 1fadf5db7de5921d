"""Whole iterations of fastp3o's trainer and of TRL's: rollouts, rewards, log-probs and four epochs
of updates.

    python -m pytest benchmarks/test_iteration.py

`iteration_trainers.py` says how they differ. They train in turns in one process. On a busy CPU,
give it one thread (OMP_NUM_THREADS=1): then it is the processor's time that is measured.
"""

import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.iteration_trainers import (
    CLOCK,
    EPOCHS,
    PHASES,
    PRECISION,
    TRAINERS,
    Seconds,
    Stopwatch,
    Task,
    save_model,
)
from benchmarks.measure import release
from benchmarks.peak_memory import PeakMemory
from benchmarks.peers import AbsentError
from benchmarks.recording import device_is_lost
from benchmarks.shapes import CUDA, LARGE, TRIAL
from benchmarks.test_rollouts import MODELS as POLICIES
from benchmarks.training_shapes import llama

MODELS = POLICIES | {"small": llama(48, 128, 2, 2, 2, 512)}
# Of 1 B and a peer a turn takes a minute and a half, most of it to load and to start.
TURNS = 1 if CUDA else 2
# Iterations of a turn; the first one is left out.
ITERATIONS = 2
# Passes of a minibatch through TRL's models, so that activations fit.
PASSES = 8 if LARGE else 1


class Iteration(NamedTuple):
    """P prompts of this many tokens, and the tokens of each of their K responses."""

    model: str
    P: int
    prompt: int
    response: int
    K: int


# TL;DR's lengths: all that a GPU has time for. On a CPU also the quickstart's, small tasks, and few
# and short prompts for the model that would train for minutes.
SHAPES, RESPONSES = [("policy", 64, 350, 40)], [2]
if not LARGE:
    RESPONSES = [2, 4]
    SHAPES = [("quickstart", 8, 350, 40), ("quickstart", 8, 100, 32), ("quickstart", 32, 100, 32)]
    SHAPES += [("small", 8, 24, 16), ("policy", 4, 48, 16)]
CASES = (
    [Iteration("quickstart", 2, 9, 5, 2)]
    if TRIAL
    else [Iteration(*shape, K) for shape in SHAPES for K in RESPONSES]
)


IDS = {case: "-".join(map(str, case)) for case in CASES}
OURS, *PEERS = TRAINERS


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Folders of the models."""
    folders = {name: tmp_path_factory.mktemp(name) for name in {case.model for case in CASES}}
    for name, folder in folders.items():
        save_model(MODELS[name], folder)
    return folders


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("case", CASES, ids=IDS.get)
def test_iteration_of_fastp3o_and_peers(benchmark, case, name, models, tmp_path):
    """In turns. `trainers`: of each, the iteration of median length. ratio: the median of its
    length to fastp3o's in a turn. A peer that fails leaves fastp3o alone.
    """
    absent: dict[str, dict] = {}
    try:
        found = run_in_turns(benchmark, case, [name, OURS], models[case.model], tmp_path)
    except Exception as error:
        if device_is_lost():
            raise
        kind = "" if isinstance(error, ImportError | AbsentError) else f"{type(error).__name__}: "
        absent = {name: {"absent": kind + str(error).partition("\n")[0][:200]}}
        found = run_in_turns(None, case, [OURS], models[case.model], tmp_path)
    benchmark.extra_info |= record(case, found | absent)


def run_in_turns(
    benchmark, case: Iteration, names: list[str], model: Path, folder: Path
) -> dict[str, dict]:
    """benchmark: None after one that has failed."""
    task = Task(
        model, random_prompts(case, MODELS[case.model].vocab_size), case.response, case.K, PASSES
    )
    iterations: dict[str, list[Seconds]] = {name: [] for name in names}
    peaks: dict[str, list[int]] = {}

    def turn(number: int) -> None:
        for name in names:
            with ExitStack() as first_iteration, TemporaryDirectory(dir=folder) as own_folder:
                # Counting slows down what is left out anyhow.
                peaks.setdefault(
                    name, first_iteration.enter_context(peak_memory()) if number == 0 else []
                )
                stopwatch = Stopwatch(first_iteration.close)
                AcceleratorState._reset_state()  # keeps the precision of the trainer before
                iterations[name] += TRAINERS[name](task, ITERATIONS, Path(own_folder), stopwatch)[
                    1:
                ]
            release()

    numbers = iter(range(TURNS))
    if benchmark is None:
        for number in numbers:
            turn(number)
    else:
        benchmark.pedantic(lambda: turn(next(numbers)), rounds=TURNS)
    return {name: figures(iterations, name) | {"peak_gb": peaks[name][0] / 1e9} for name in names}


def record(case: Iteration, trainers: dict[str, dict]) -> dict[str, object]:
    config = MODELS[case.model]
    return case._asdict() | {
        "level": "iteration",
        "implementation": "fastp3o",
        "D": config.hidden_size,
        "V": config.vocab_size,
        "layers": config.num_hidden_layers,
        "epochs": EPOCHS,
        "clock": CLOCK,
        "dtype": PRECISION,
        "trainers": trainers,
    }


def figures(iterations: dict[str, list[Seconds]], name: str) -> dict[str, float]:
    """Of the iteration of median length, with seconds of its phases where they are known."""
    median = sorted(iterations[name], key=lambda one: one["seconds"])[
        (len(iterations[name]) - 1) // 2
    ]
    pairs = zip(iterations[name], iterations[OURS], strict=True)
    ratios = [one["seconds"] / ours["seconds"] for one, ours in pairs]
    phases = {f"{phase}_s": median[phase] for phase in (*PHASES, "other") if phase in median}
    return phases | {
        "seconds": median["seconds"],
        "ratio": statistics.median(ratios),
        "iterations": len(ratios),
    }


def random_prompts(case: Iteration, vocabulary: int) -> list[str]:
    generator = random.Random(1)
    # Word 0 pads.
    prompts = [generator.choices(range(1, vocabulary), k=case.prompt) for _ in range(case.P)]
    return [" ".join(f"w{index}" for index in prompt) for prompt in prompts]


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Bytes, once left: of all tensors that operations returned within on a CPU, of the allocator
    on a GPU.
    """
    peak: list[int] = []
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
        yield peak
        peak.append(torch.cuda.max_memory_allocated())
    else:
        with PeakMemory() as memory:
            yield peak
        peak.append(memory.peak)
