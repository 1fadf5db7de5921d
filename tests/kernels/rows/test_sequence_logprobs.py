import torch

from fastp3o_kernels import sequence_logprobs
from tests.kernels.problems import DEVICE


def test_sequence_logprobs_are_sums_and_differentiable(impl):
    values = torch.randn(10, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 1, 7, 10], dtype=torch.int32, device=DEVICE)
    sums = sequence_logprobs(values, offsets, impl=impl)
    expected = torch.stack([values[0:1].sum(), values[1:7].sum(), values[7:].sum()])
    torch.testing.assert_close(sums, expected)
    (sums * torch.tensor([1.0, 2.0, 3.0], device=DEVICE)).sum().backward()
    assert values.grad.tolist() == [1.0] + [2.0] * 6 + [3.0] * 3
