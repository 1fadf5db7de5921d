"""When the device has done what was launched, and numbers that the host reads late: neither waits
for the device.
"""

import time

import torch
from torch import Tensor


class Moment:
    """When the device has done all that was launched before; on a CPU that is when this is made."""

    def __init__(self, device: torch.device):
        self.time = time.perf_counter()
        self.event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)
            self.event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: "Moment") -> float:
        """Call after both events have completed."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return earlier.event.elapsed_time(self.event) / 1000


class LateNumbers(Moment):
    """Numbers that are on their way to the host, and the moment of their arrival: the host launches
    more meanwhile.
    """

    def __init__(self, numbers: Tensor):
        self.numbers = numbers.to("cpu", non_blocking=True)
        super().__init__(numbers.device)

    def read(self) -> list[float]:
        """Waits until they have arrived, and not for what was launched since."""
        if self.event is not None:
            self.event.synchronize()
        return self.numbers.tolist()
