"""Counts what the host hands to the device while something runs."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers import AbsentError
from benchmarks.shapes import CUDA

aten = torch.ops.aten
# Position of the left factor among the arguments; the right one follows, transposed for oneDNN's
# products.
LEFT = {aten.mm: 0, aten.bmm: 0, aten.addmm: 1, aten.addmm_: 1, aten.baddbmm: 1, aten.baddbmm_: 1}
ONEDNN = "mkldnn::_linear_pointwise"
LAUNCHES = (
    "cudaLaunchKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


class Kernel(NamedTuple):
    """The beginning of a kernel's name, its launches, and the milliseconds of all of them."""

    name: str
    launches: int
    ms: float


class Operations(TorchDispatchMode):
    """count: torch's operations in this thread. total: floating-point ones of matrix products, 2 a
    multiply-add.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled() and func._can_decompose():
            # Elsewhere a composite operation has come apart before it is seen.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        self.count += 1
        place = LEFT.get(func._overloadpacket)
        if place is not None:
            left, right = args[place : place + 2]
            self.total += 2 * left.numel() * right.shape[-1]
        elif func._schema.name == ONEDNN:
            left, right = args[:2]
            self.total += 2 * left.numel() * right.shape[0]
        return func(*args, **(kwargs or {}))


def host_work(function: Callable[[], object]) -> dict[str, float]:
    """Counts, on a GPU, `launches` and the `gpu_ms` in which it worked; on a CPU `operations` of
    torch.
    """
    if not CUDA:
        with Operations() as operations:
            function()
        return {"operations": operations.count}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        function()
        torch.cuda.synchronize()
    averages = profile.key_averages()
    launches = sum(event.count for event in averages if event.key.startswith(LAUNCHES))
    return {"launches": launches, "gpu_ms": kernel_ms(averages)}


def kernel_ms(averages: Iterable[FunctionEventAvg]) -> float:
    """Milliseconds of all kernels and copies."""
    return sum(event.self_device_time_total for event in on_device(averages)) / 1e3


def on_device(averages: Iterable[FunctionEventAvg]) -> list[FunctionEventAvg]:
    """Kernels and copies. The host's operations that launched them show the same times again."""
    return [
        event
        for event in averages
        if event.device_type != DeviceType.CPU and not event.is_user_annotation
    ]


def launches_by_name(function: Callable[[], object]) -> list[Kernel]:
    """Each kernel and copy. The host is not profiled, which would slow it down. Raises AbsentError
    without a GPU that torch's profiler knows.
    """
    if torch.profiler.ProfilerActivity.CUDA not in torch.profiler.supported_activities():
        raise AbsentError("torch's profiler knows no GPU here")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return by_name(profile.key_averages())


def by_name(averages: Iterable[FunctionEventAvg]) -> list[Kernel]:
    """The longest first."""
    found = [
        Kernel((event.key or "")[:80], event.count, event.self_device_time_total / 1e3)
        for event in on_device(averages)
    ]
    return sorted(found, key=lambda kernel: -kernel.ms)
