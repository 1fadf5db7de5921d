import torch

from fastp3o_kernels.rows import in_torch
from fastp3o_kernels.rows.transform import LogitsTransform, transform_
from tests.kernels.problems import DEVICE


def test_a_gradient_of_another_dtype_is_rounded_once():
    """Half-precision products on a GPU without triton: fp32 logits, and their gradient in half precision."""
    torch.manual_seed(0)
    transform = LogitsTransform(softcap=5.0, temperature=0.7)
    logits = transform_(torch.randn(2 * in_torch.ROWS_AT_ONCE + 3, 40, device=DEVICE), transform)
    labels, coefficients = torch.randint(40, (len(logits),), device=DEVICE), torch.randn(len(logits), device=DEVICE)
    exact, rounded = torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bfloat16)
    for out in (exact, rounded):
        in_torch.dlogits(logits, labels, coefficients, transform, -100, out=out)
    assert torch.equal(rounded, exact.bfloat16())
