"""Bytes that the kernels move, counted in the interpreter, against the formulas that benchmarks divide by."""

import pytest
import torch

from fastp3o_kernels.operation import INTERPRET
from tests.kernels.interpreted import counted_traffic
from tests.kernels.levels import Batch

pytestmark = pytest.mark.skipif(not INTERPRET, reason="bytes are counted in the interpreter")

LENGTHS, V = [3, 2, 1, 2], 20_000
N = sum(LENGTHS)


def about(count):
    return pytest.approx(count, rel=0.02)


def test_off_policy_reads_the_logits_twice_and_writes_them_once(monkeypatch):
    batch = Batch("logits", LENGTHS, V, dtype=torch.bfloat16, clipping="none")
    leaves = batch.leaves()
    with counted_traffic(monkeypatch) as forward:
        loss = batch.output(leaves, impl="triton").loss
    assert forward.loaded == about(2 * N * V)
    assert forward.stored < 0.02 * forward.loaded
    with counted_traffic(monkeypatch) as backward:
        loss.backward()
    assert (backward.loaded, backward.stored) == (about(2 * N * V), about(2 * N * V))
    assert forward.memory + backward.memory == about(6 * N * V)
