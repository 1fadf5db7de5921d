"""Times a case in turns with a bare operation, its lower bound, and files the figures under the
benchmark's name.
"""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar, TypeVarTuple

import torch

from benchmarks.peak_memory import PeakMemory
from benchmarks.shapes import CUDA, TRIAL
from fastp3o_kernels.head import scratch

# Seconds that one benchmark may take: few rounds where one is slow.
SECONDS = 0.4 if CUDA else 1.5
ROUNDS = range(1, 1) if TRIAL else range(3, 16)
# Processor time leaves out other processes, but adds up all threads.
CLOCK = "processor" if not CUDA and torch.get_num_threads() == 1 else "wall"

# The GPU is kept busy for this long, about 5 ms, while the host queues what is measured: else the
# first kernels would wait for their launches, a tenth of a forward pass of 0.7 ms.
QUEUEING_CYCLES = 8_000_000

Argument = TypeVar("Argument")
Key = TypeVarTuple("Key")
Made = TypeVar("Made")


@dataclass
class Case:
    """The case that is measured. The figures are of one call of run(prepare())."""

    level: str
    implementation: str
    passes: str
    N: int
    D: int
    V: int
    dtype: str
    bytes: float  # that the pass must move, where moving them is the work
    operations: float  # floating-point operations of its matrix products
    gradient_bytes: int  # of the results, which are not counted as extra memory


def milliseconds(function: Callable[[], object], *, queued: bool = False) -> float:
    """queued: leaves out the host's time to queue what runs on a GPU, which in training it does
    ahead.
    """
    if not CUDA:
        clock = time.process_time if CLOCK == "processor" else time.perf_counter
        began = clock()
        function()
        return 1e3 * (clock() - began)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if queued:
        torch.cuda._sleep(QUEUEING_CYCLES)
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(
    benchmark,
    case: Case,
    prepare: Callable[[], Argument],
    run: Callable[[Argument], object],
    bare: Callable[[], object],
    bare_share: float = 1.0,
    typical: Callable[[list[float]], float] = statistics.median,
) -> None:
    """Writes typical times of all rounds to benchmark.extra_info. `bare`: the bare operation;
    `bare_share`: the part of it that the case must do.

    Memory is the allocator's on a GPU. On a CPU the tensors that operations return are counted,
    which sees nothing of compiled code.
    """
    times, bare_times, extra = [], [], []

    def setup():
        bare_times.append(milliseconds(bare, queued=True))
        argument = prepare()
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            extra.append(-torch.cuda.memory_allocated() - case.gradient_bytes)
        return (argument,), {}

    def target(argument):
        times.append(milliseconds(lambda: run(argument), queued=True))
        if CUDA:
            extra[-1] += torch.cuda.max_memory_allocated()

    # The first call compiles; the second says how many fit.
    for _ in range(2):
        (argument,), _ = setup()
        target(argument)
        del argument
    rounds = int(SECONDS / (1e-3 * (times[-1] + bare_times[-1])))
    del times[:], bare_times[:], extra[:]
    benchmark.pedantic(target, setup=setup, rounds=min(max(rounds, ROUNDS.start), ROUNDS.stop))
    if not CUDA and "compile" not in case.implementation and "Liger" not in case.implementation:
        argument = prepare()
        scratch.SPARE.clear()  # which counts, though it stays between calls
        with PeakMemory() as memory:
            run(argument)
        extra = [memory.peak - case.gradient_bytes]
    ms, bare_ms = typical(times), bare_share * typical(bare_times)
    benchmark.extra_info |= asdict(case) | {
        "clock": CLOCK,
        "ms": ms,
        "spread_ms": max(times) - min(times),
        "bare_ms": bare_ms,
        "ratio_to_bare": ms / bare_ms,
        "gb_per_s": case.bytes / ms / 1e6 if case.bytes else None,
        "tflop_per_s": case.operations / ms / 1e9 if case.operations else None,
        "extra_gb": statistics.median(extra) / 1e9 if extra else None,
    }


def release() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def one_at_a_time(make: Callable[[*Key], Made]) -> Callable[[*Key], Made]:
    """Keeps what was made last, and gives its memory back before it makes anything else."""
    kept: dict[tuple[*Key], Made] = {}

    def made(*key: *Key) -> Made:
        if key not in kept:
            kept.clear()
            release()
            kept[key] = make(*key)
        return kept[key]

    return made
