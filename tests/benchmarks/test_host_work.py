"""What is counted while something runs: each product once, whoever computes it, and each kernel
once.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from benchmarks import inputs, objectives
from benchmarks.host_work import Operations, by_name, kernel_ms
from benchmarks.shapes import HeadSizes
from fastp3o_kernels import onednn

N, D, V = 2048, 32, 203


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")
def test_products_of_onednn_count_as_torchs():
    a, b, bias = torch.randn(5, 7, 11), torch.randn(11, 13), torch.randn(13)
    with Operations() as plain:
        torch.addmm(bias, a.flatten(0, 1), b)
    with Operations() as onednns:
        onednn.product(a, b, bias)
    assert onednns.total == plain.total == 2 * 5 * 7 * 11 * 13


@pytest.mark.parametrize("name", ["RLOO", "GRPO"])
def test_a_loss_of_ours_makes_three_products_on_any_processor(name):
    problem = objectives.make_problem(inputs.random_inputs(HeadSizes(D, V), N))
    leaves = [problem.inputs.hidden.requires_grad_(), problem.inputs.weight.requires_grad_()]
    # whatever is decided at the first use
    torch.autograd.grad(objectives.ours(problem, name), leaves)
    with Operations() as operations:
        torch.autograd.grad(objectives.ours(problem, name), leaves)
    assert operations.total == 6 * N * D * V


def test_a_kernel_counts_once_though_its_operation_on_the_host_has_its_time_too():
    def event(device, ms, annotation=False):
        times = {"self_device_time_total": 1e3 * ms, "is_user_annotation": annotation}
        return SimpleNamespace(device_type=device, key=f"kernel of {ms} ms", count=2, **times)

    kernels = [event(DeviceType.CUDA, 3.0), event(DeviceType.CUDA, 4.0)]
    host = [event(DeviceType.CPU, 3.0), event(DeviceType.CPU, 4.0), event(DeviceType.CPU, 0.0)]
    assert kernel_ms(kernels + host + [event(DeviceType.CUDA, 7.0, annotation=True)]) == 7.0
    assert by_name(kernels + host) == [("kernel of 4.0 ms", 2, 4.0), ("kernel of 3.0 ms", 2, 3.0)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.randn(64, 64) @ torch.randn(64, 64)
    assert kernel_ms(profile.key_averages()) == 0.0
