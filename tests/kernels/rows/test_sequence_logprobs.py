import torch

from fastp3o_kernels import sequence_logprobs
from tests.kernels.problems import DEVICE


def test_sequence_logprobs_are_sums_and_differentiable(impl):
    values = torch.randn(10, device=DEVICE, requires_grad=True)
    offsets = torch.tensor([0, 1, 7, 7, 10], dtype=torch.int32, device=DEVICE)
    sums = sequence_logprobs(values, offsets, impl=impl)
    torch.testing.assert_close(sums, torch.stack([values[begin:end].sum() for begin, end in offsets.unfold(0, 2, 1)]))
    (sums * torch.tensor([1.0, 2.0, 9.0, 3.0], device=DEVICE)).sum().backward()
    assert values.grad.tolist() == [1.0] + [2.0] * 6 + [3.0] * 3
    for others in (offsets.tolist(), offsets.cpu().long()):
        assert torch.equal(sequence_logprobs(values, others, impl=impl), sums)
    assert sequence_logprobs(values[:0], [0, 0, 0], impl=impl).tolist() == [0.0, 0.0]
