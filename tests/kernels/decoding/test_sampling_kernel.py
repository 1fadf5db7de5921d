"""Triton samples the same tokens as PyTorch, in one launch that reads the logits once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o_kernels.decoding import response_keys, sample_tokens
from fastp3o_kernels.decoding.sampling import least_probability
from fastp3o_kernels.operation import INTERPRET
from tests.kernels.interpreted import counted_launches, counted_traffic
from tests.kernels.problems import DEVICE, EXAMPLES, vocabularies

# The interpreter warns about a block without a possible token; hardware gives -inf.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")


def check(logits) -> None:
    R = len(logits)
    keys = response_keys(0, torch.arange(R, device=DEVICE), 1)[:, 0]
    steps = torch.arange(R, device=DEVICE) % 13
    expected = sample_tokens(logits, keys, steps, impl="eager")
    got = sample_tokens(logits, keys, steps, impl="triton")
    # A token depends only on logits, key and step of its slot.
    some = torch.arange(R, device=DEVICE).flip(0)[::2]
    for impl, result in (("eager", expected), ("triton", got)):
        assert torch.equal(
            sample_tokens(logits[some], keys[some], steps[some], impl=impl).tokens,
            result.tokens[some],
        )
    # Tokens may differ only where two were equal to the last digits.
    assert (got.tokens != expected.tokens).sum() <= R // 100
    exact = logits.double().log_softmax(1).gather(1, got.tokens[:, None])[:, 0]
    torch.testing.assert_close(got.logprobs.double(), exact, atol=1e-5, rtol=1e-6)
    assert (got.logprobs <= 0).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    R=st.integers(1, 8),
    V=vocabularies(1, 400),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    impossible=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_random_logits(R, V, scale, impossible, seed):
    torch.manual_seed(seed)
    logits = scale * torch.randn(R, V, device=DEVICE)
    if impossible:
        logits[:, torch.rand(V) < 0.6] = -float("inf")
        logits[:, seed % V] = 0.0
    check(logits)


def test_vocabularies_around_a_tile_layouts_and_maxima_far_apart():
    torch.manual_seed(0)
    logits = torch.randn(4, 20_000, device=DEVICE)
    for view in (logits[:, :8192], logits[::2, 3:8196], logits.T[:50], logits[:1].expand(5, -1)):
        check(view)
    for probs in (logits[:, :8192].softmax(1), (4 * logits).softmax(1)):
        assert torch.equal(
            *(least_probability(probs, 0, 1 - 1e-6, 0.0, impl) for impl in ("eager", "triton"))
        )
    logits[0, :9000] -= 1e4
    logits[1, 9000:] = -float("inf")
    logits[2, 19_999] = 1e4
    check(logits)


@pytest.mark.skipif(not INTERPRET, reason="counted in the interpreter")
def test_one_launch_reads_logits_once_and_probabilities_from_memory_once(monkeypatch):
    """A sort writes 20 bytes a token to memory: values, indices and sums. The bisection rereads 4
    in the L2 cache.
    """
    R, V = 2, 50_257
    logits, numbers = torch.randn(R, V), torch.arange(R)
    for kernel, run, reads in (
        ("race_kernel", lambda: sample_tokens(logits, numbers, numbers, impl="triton"), 1),
        (
            "top_p_kernel",
            lambda: least_probability((3 * logits).softmax(1), 0, 0.95, 0.0, "triton"),
            20,
        ),
    ):
        with counted_traffic(monkeypatch) as traffic, counted_launches(monkeypatch) as launches:
            run()
        assert launches == {kernel: 1}
        assert traffic.memory == pytest.approx(4 * R * V, rel=0.02)
        assert traffic.loaded <= 1.01 * reads * 4 * R * V
