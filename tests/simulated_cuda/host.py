"""The host beside a device that is late: it waits, or goes on while copies are under way.

A copy to the host that nobody has waited for is poison: NaN, or random numbers. A copy from pinned memory is read when
the host next waits: memory that has changed until then was changed too early.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.simulated_cuda.record import note_wait, place


class Copy(NamedTuple):
    time: int
    finish: Callable[[], None]


@dataclass
class Host:
    """time: grows with every copy. sync_debug_mode: torch's, "default", "warn" or "error". capture: the graph under
    way, if any.
    """

    time: int = 0
    under_way: list[Copy] = field(default_factory=list)
    sync_debug_mode: str = "default"
    capture: Any = None


host = Host()


def wait_for_device(kind: str, until: int | None = None) -> None:
    """The host waits for all copies so far, or those until a time. Raises RuntimeError where CUDA forbids it."""
    if host.capture is not None:
        host.capture.invalid = True
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({kind} at {place()})")
    if host.sync_debug_mode == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation ({kind} at {place()})")
    note_wait(kind)
    finish_copies(host.time if until is None else until)


def finish_copies(until: int) -> None:
    done = [copy for copy in host.under_way if copy.time <= until]
    host.under_way = [copy for copy in host.under_way if copy.time > until]
    for copy in done:
        copy.finish()


def copy_later(finish: Callable[[], None]) -> None:
    host.time += 1
    host.under_way.append(Copy(host.time, finish))


def copy_to_host_later(target: Tensor, values: Tensor) -> None:
    """target, values: on the host. target is poison until the host has waited."""
    poison(target)
    copy_later(lambda: target.copy_(values))


def copy_to_device_later(source: Tensor, values: Tensor) -> None:
    """source: pinned memory, from which `values` were copied to the device."""
    where = place()

    def check() -> None:
        if not torch.equal(source.view(torch.uint8), values.view(torch.uint8)):
            raise RuntimeError(f"pinned memory has changed before its copy to the device was over (copied at {where})")

    if source.is_contiguous() and source.dim():
        copy_later(check)


def poison(target: Tensor) -> None:
    if target.is_floating_point():
        target.fill_(float("nan"))
    elif target.dtype == torch.bool:
        target.random_(0, 2)
    else:
        target.random_(0, 100)
