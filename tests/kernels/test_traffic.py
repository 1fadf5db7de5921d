"""Bytes that the kernels move, counted in the interpreter, against the formulas that benchmarks divide by."""

import pytest
import torch

from fastp3o_kernels import P3OSettings, logits_p3o_loss
from fastp3o_kernels.operation import INTERPRET
from fastp3o_kernels.p3o.pair_kernel import TERMS, launch_pairs
from fastp3o_kernels.p3o.pairs import PairInputs
from fastp3o_kernels.rows.logits_kernel import launch_dlogits, launch_logprobs
from fastp3o_kernels.rows.rows import LogitsTransform, Rows
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.problems import random_pairs

pytestmark = pytest.mark.skipif(not INTERPRET, reason="bytes are counted in the interpreter")

LENGTHS, V = [3, 2, 1, 2], 20_000
N = sum(LENGTHS)
UNCLIPPED = P3OSettings(clipping="none")


def about(count):
    return pytest.approx(count, rel=0.02)


@pytest.fixture
def pairs():
    pairs = random_pairs(LENGTHS, V, torch.device("cpu"))
    pairs.logits = pairs.logits.bfloat16().requires_grad_()
    return pairs


def test_off_policy_reads_the_logits_twice_and_writes_them_once(monkeypatch, pairs):
    with counted_traffic(monkeypatch) as forward, counted_launches(monkeypatch) as launches:
        loss = pairs.call(logits_p3o_loss, pairs.logits, UNCLIPPED, impl="triton").loss
    assert forward.loaded == about(2 * N * V)
    assert forward.stored < 0.02 * forward.loaded
    assert launches == {"logprobs_kernel": 1, "pair_kernel": 1, "results_kernel": 1}
    with counted_traffic(monkeypatch) as backward, counted_launches(monkeypatch) as launches:
        loss.backward()
    assert (backward.loaded, backward.stored) == (about(2 * N * V), about(2 * N * V))
    assert forward.memory + backward.memory == about(6 * N * V)
    assert launches == {"dlogits_kernel": 1}


def test_rows_without_a_coefficient_are_not_read(monkeypatch, pairs):
    pairs.rewards[0] = 1.0
    loss = pairs.call(logits_p3o_loss, pairs.logits, P3OSettings(clipping="none", kl_coef=0.0), impl="triton").loss
    with counted_traffic(monkeypatch) as backward:
        loss.backward()
    assert (backward.loaded, backward.stored) == (about(2 * sum(LENGTHS[2:]) * V), about(2 * N * V))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_of_the_head(monkeypatch, pairs, out_dtype):
    """fp32 logits: 4 bytes each forward; 4 and those of the gradient's dtype backward."""
    rows = Rows(pairs.logits.detach().float(), pairs.labels)
    out, coefficients = torch.empty(N, V, dtype=out_dtype), torch.ones(N)
    with counted_traffic(monkeypatch) as forward:
        _, row_max, log_sum = launch_logprobs(rows)
    assert forward.memory == about(4 * N * V)
    with counted_traffic(monkeypatch) as backward:
        launch_dlogits(rows, row_max, log_sum, coefficients, out)
    assert (backward.loaded, backward.stored) == (about(4 * N * V), about(out.itemsize * N * V))


def test_a_bias_is_read_next_to_the_logits(monkeypatch, pairs):
    logits = pairs.logits.detach().float()
    with counted_traffic(monkeypatch) as traffic:
        launch_logprobs(Rows(logits, pairs.labels, LogitsTransform(bias=torch.randn(V))))
    assert traffic.loaded == about(8 * N * V)
    assert traffic.memory == about(4 * N * V + 4 * V)


@pytest.mark.parametrize("clipping", ["joint", "token"])
@pytest.mark.parametrize("weighted", [False, True])
def test_pairs(monkeypatch, pairs, clipping, weighted):
    given = pairs.cu_seqlens, pairs.old_logprobs, pairs.ref_logprobs, pairs.rewards
    old_token_logprobs = pairs.old_token_logprobs if clipping == "token" else None
    settings = P3OSettings(clipping=clipping)
    with counted_traffic(monkeypatch) as traffic:
        sampler_logprobs = pairs.old_logprobs if weighted else None
        inputs = PairInputs(*given, None, old_token_logprobs, torch.tensor(2.0), sampler_logprobs)
        launch_pairs(pairs.old_token_logprobs, inputs, settings)
    # Two responses to two prompts. Their offsets are read for the sums, for what is empty and for the coefficients,
    # which pass from one step to the other by way of memory, as the sums do. The divisor is read for coefficients and
    # for the loss. What a prompt adds to loss and metrics passes to a second launch.
    # Importance weights take a further value of each response, two terms of each prompt and two results.
    responses, results, terms = 4, (13 if weighted else 11) * 4, 2 * (TERMS + 2 * weighted) * 4
    offsets, response_values, divisor = 3 * 2 * 4, (5 if weighted else 4) * 4, 4 + 4
    if clipping == "token":
        # Each log-prob is summed first, and clipped against the old one when the sums are known.
        read, written = offsets + response_values + 2 * 4, 3 * 4
        loaded, stored = 3 * 4 * N + responses * read + divisor + 4, 4 * N + responses * written + results
    else:
        read, written = offsets + response_values + 4, 2 * 4
        loaded, stored = 4 * N + responses * read + divisor, 4 * N + responses * written + results
    assert (traffic.loaded, traffic.stored) == (loaded + terms, stored + terms)
