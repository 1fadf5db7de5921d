import torch

from fastp3o_kernels.rows import oracle
from fastp3o_kernels.rows.rows import LogitsTransform, Rows
from tests.kernels.problems import DEVICE


def test_a_gradient_of_another_dtype_is_rounded_once():
    """Half-precision products on a GPU without triton: fp32 logits, and their gradient in half precision."""
    torch.manual_seed(0)
    transform = LogitsTransform(softcap=5.0, temperature=0.7)
    logits = torch.randn(2 * oracle.ROWS_AT_ONCE + 3, 40, device=DEVICE)
    labels, coefficients = torch.randint(40, (len(logits),), device=DEVICE), torch.randn(len(logits), device=DEVICE)
    exact, rounded = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bfloat16)
    for out in (exact, rounded):
        oracle.dlogits(Rows(logits, labels, transform), coefficients, None, out)
    assert torch.equal(rounded, exact.bfloat16())


def test_the_slope_at_the_cap_is_small_and_not_a_rounding_of_zero():
    """From tanh in fp32, which is almost 1 at five times the cap, the slope could not be told."""
    torch.manual_seed(0)
    transform = LogitsTransform(softcap=5.0, temperature=0.7)
    logits = 25 + 15 * torch.rand(40, 30, dtype=torch.float64, device=DEVICE)
    labels, coefficients = torch.randint(30, (40,), device=DEVICE), torch.randn(40, device=DEVICE)

    exact = logits.clone().requires_grad_()
    logprobs = (5 * (exact / 5).tanh() / 0.7).log_softmax(1).gather(1, labels[:, None]).squeeze(1)
    (logprobs * coefficients).sum().backward()

    got = torch.empty(40, 30, device=DEVICE)
    oracle.dlogits(Rows(logits.float(), labels, transform), coefficients, None, got)
    torch.testing.assert_close(got.double(), exact.grad, rtol=2e-5, atol=0)
