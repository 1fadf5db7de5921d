"""Hidden states -> each objective -> gradients, next to the bare matrix products of the head.

    python -m pytest benchmarks/test_objectives.py

Operations are counted in one more call, in units of F = N V D. Where a peer compiles, operations
and, on a CPU, memory are of the same code uncompiled. A CPU may have other work at the same time:
its times are the least of all rounds, and with OMP_NUM_THREADS=1 of the processor.
"""

import statistics
from functools import partial

import pytest
import torch

from benchmarks import bare_operations, objectives
from benchmarks.host_work import Operations
from benchmarks.measure import measure
from benchmarks.objectives import OBJECTIVES, WAYS, make_problem
from benchmarks.peak_memory import PeakMemory
from benchmarks.shapes import CUDA, HEADS, TOKENS, typed
from benchmarks.test_hidden_level import fresh_inputs, make_case

TYPICAL = statistics.median if CUDA else min
PEERS = [
    pytest.param(way, name, id=typed((way, name))) for way, names in WAYS.items() for name in names
]


def run_both(benchmark, way: str, name: str, compute_loss) -> None:
    problem = make_problem(fresh_inputs(HEADS[0], TOKENS[0]))
    inputs = problem.inputs
    leaves = inputs.hidden, inputs.weight

    def run(compute_loss):
        return torch.autograd.grad(compute_loss(problem, name), leaves)

    case = make_case(way, "forward and backward", inputs, 3, leaves)
    case.level = "objectives"
    bare = bare_operations.products(inputs, logits=1, dhidden=1, dweight=1)
    measure(benchmark, case, lambda: None, lambda _: run(compute_loss), bare, typical=TYPICAL)
    uncompiled = partial(compute_loss, compiled=False) if way == "Liger" else compute_loss
    with Operations() as operations:
        run(uncompiled)
    if benchmark.extra_info["extra_gb"] is None and not CUDA:
        with PeakMemory() as memory:
            run(uncompiled)
        benchmark.extra_info["extra_gb"] = (memory.peak - case.gradient_bytes) / 1e9
    F = len(inputs.hidden) * inputs.weight.numel()
    benchmark.extra_info |= {"objective": name, "counted_operations": operations.total / F}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objective_of_fastp3o(benchmark, name):
    run_both(benchmark, "fastp3o", name, objectives.ours)


@pytest.mark.parametrize(("way", "name"), PEERS)
def test_objective_of_peers(benchmark, way, name):
    run_both(benchmark, way, name, WAYS[way][name])
