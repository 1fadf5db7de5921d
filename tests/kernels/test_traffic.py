"""Bytes that the kernels move, counted in the interpreter, against the formulas that benchmarks divide by."""

import pytest
import torch

from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.rows.logits_kernel import launch_dlogits, launch_logprobs
from fastp3o_kernels.rows.rows import LogitsTransform, Rows
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


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_the_head(monkeypatch, out_dtype):
    """fp32 logits and a bias: 8 bytes each forward, and 8 and those of the gradient's dtype backward; the bias is in
    memory once.
    """
    transform = LogitsTransform(bias=torch.randn(V))
    rows = Rows(torch.randn(N, V), torch.randint(V, (N,)), transform)
    out, coefficients = torch.empty(N, V, dtype=out_dtype), torch.ones(N)
    with counted_traffic(monkeypatch) as forward:
        _, row_max, log_sum = launch_logprobs(rows)
    assert forward.loaded == about(8 * N * V)
    assert forward.memory == about(4 * N * V + 4 * V)
    with counted_traffic(monkeypatch) as backward:
        launch_dlogits(rows, row_max, log_sum, coefficients, out)
    assert (backward.loaded, backward.stored) == (about(8 * N * V), about(out.itemsize * N * V))
