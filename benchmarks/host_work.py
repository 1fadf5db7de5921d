"""Counts what the host hands to the device while something runs."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.shapes import CUDA

LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


class Operations(TorchDispatchMode):
    """Counts torch's operations, in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def host_work(function: Callable[[], object]) -> dict[str, float]:
    """Counts, on a GPU, `launches` of kernels, copies and graphs, and `gpu_ms`, the time in which it worked. On a CPU
    `operations` of torch.
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
    return {"launches": launches, "gpu_ms": sum(event.self_device_time_total for event in averages) / 1e3}
