"""torch.cuda of the pretended devices."""

import os
from functools import cache
from types import SimpleNamespace
from typing import Any

from tests.simulated_cuda import native

native.library()  # before torch is imported
os.environ["TRITON_INTERPRET"] = "1"  # before triton is

# ruff: noqa: E402
import torch
from torch import Tensor

from tests.interpreter import mask_by_truths, quicken, round_to_nearest
from tests.simulated_cuda import graphs, triton_launches
from tests.simulated_cuda.host import finish_copies, host, wait_for_device
from tests.simulated_cuda.operations import (
    SimulatedDevice,
    cuda_device,
    scaled_dot_product_attention,
)
from tests.simulated_cuda.tensors import is_simulated

TOTAL_MEMORY = 80 * 2**30


class Stream:
    """Operations on all streams run in the order in which the host launches them."""

    made = 0

    def __init__(self, device: Any = None, priority: int = 0, **_: Any):
        Stream.made += 1
        self.cuda_stream, self.device = Stream.made, device_with_number(device)
        self.device_index, self.device_type, self.stream_id = self.device.index, 1, Stream.made

    def wait_stream(self, other: "Stream") -> None: ...

    def synchronize(self) -> None:
        wait_for_device("Stream.synchronize")


class Event:
    def __init__(self, enable_timing: bool = False, **_: Any):
        self.time: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.time = host.time

    def synchronize(self) -> None:
        if self.time is not None:
            wait_for_device("Event.synchronize", until=self.time)

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


def device_with_number(device: Any = None) -> torch.device:
    if isinstance(device, int):
        return torch.device("cuda", device)
    found = cuda_device("cuda" if device is None else device)
    assert found is not None
    return found


def exchange_device(number: int) -> int:
    before = native.library().current_device()
    if number >= 0:
        native.library().set_device(number)
    return before


def device_count() -> int:
    """CUDA_VISIBLE_DEVICES takes effect as on a GPU: before the first use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    return len([number for number in visible.split(",") if number.strip()])


def memory_allocated(device: Any = None) -> int:
    return native.library().allocated_bytes(device_with_number(device).index)


def max_memory_allocated(device: Any = None) -> int:
    return native.library().peak_bytes(device_with_number(device).index)


def set_sync_debug_mode(mode: str | int) -> None:
    host.may_wait = mode not in (2, "error")


current_streams: dict[int, Stream] = {}
default_stream_of = cache(Stream)


def default_stream(device: Any = None) -> Stream:
    return default_stream_of(device_with_number(device).index)


def current_stream(device: Any = None) -> Stream:
    return current_streams.get(device_with_number(device).index, default_stream(device))


FUNCTIONS: dict[str, Any] = {
    "CUDAGraph": graphs.CUDAGraph,
    "Event": Event,
    "Stream": Stream,
    "_exchange_device": exchange_device,
    "_lazy_init": lambda: None,
    "_maybe_exchange_device": exchange_device,
    "_sleep": lambda cycles: None,
    "current_device": lambda: native.library().current_device(),
    "current_stream": current_stream,
    "default_stream": default_stream,
    "device_count": device_count,
    "empty_cache": lambda: None,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_name": lambda device=None: "NVIDIA H100 80GB HBM3",
    "get_device_properties": lambda device=None: SimpleNamespace(total_memory=TOTAL_MEMORY),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "get_sync_debug_mode": lambda: 0 if host.may_wait else 2,
    "is_available": lambda: True,
    "is_bf16_supported": lambda *_, **__: True,
    "is_current_stream_capturing": lambda: host.capture is not None,
    "is_initialized": lambda: True,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "max_memory_allocated": max_memory_allocated,
    "mem_get_info": lambda device=None: (TOTAL_MEMORY - memory_allocated(device), TOTAL_MEMORY),
    "memory_allocated": memory_allocated,
    "reset_peak_memory_stats": lambda device=None: native.library().reset_peak(
        device_with_number(device).index
    ),
    "set_device": lambda device: exchange_device(device_with_number(device).index) and None,
    "set_rng_state": lambda state, device=None: None,
    "set_stream": lambda stream: current_streams.update({stream.device.index: stream}),
    "set_sync_debug_mode": set_sync_debug_mode,
    "synchronize": lambda device=None: wait_for_device("torch.cuda.synchronize"),
}


def install() -> None:
    """From now on torch has CUDA devices. It must come before transformers, accelerate or Triton's
    kernels look.
    """
    native.library().install()
    torch._C._set_only_lift_cpu_tensors(True)
    # oneDNN's products, on processors that have them for bf16, take scratch memory that would count
    # as the device's.
    torch._C._set_mkldnn_enabled(False)
    for name, value in FUNCTIONS.items():
        setattr(torch.cuda, name, value)
    torch.cuda.graphs.CUDAGraph = graphs.CUDAGraph
    torch._C._host_emptyCache = lambda: None
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.device_count = device_count
    quicken()
    mask_by_truths()
    round_to_nearest()
    triton_launches.install()
    move_modules_by_swapping()
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    SimulatedDevice().__enter__()


def restart() -> None:
    """Forgets what a test has left."""
    host.may_wait, host.capture = True, None
    torch.use_deterministic_algorithms(False)
    finish_copies(host.time)
    current_streams.clear()
    native.library().set_device(0)


def move_modules_by_swapping() -> None:
    """A parameter that moves stays the object it was: it takes the place of one on the other
    device, with its hooks.
    """
    # a module that moves assigns `parameter.data`
    torch._has_compatible_shallow_copy_type = lambda input, from_: True
    swap = torch.utils.swap_tensors

    def swap_with_hooks(first: Tensor, second: Tensor) -> None:
        hooks = first._post_accumulate_grad_hooks
        swap(first, second)
        if hooks:
            first._post_accumulate_grad_hooks = hooks

    torch.utils.swap_tensors = swap_with_hooks
    data = torch._C.TensorBase.data

    def set_data(tensor: Tensor, values: Tensor) -> None:
        if is_simulated(tensor) == is_simulated(values):
            data.__set__(tensor, values)
            return
        moved = values.detach().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            moved = torch.nn.Parameter(moved, tensor.requires_grad)
        swap_with_hooks(tensor, moved)

    torch.Tensor.data = property(data.__get__, set_data)
