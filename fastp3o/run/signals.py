"""Ends a run on SIGTERM, SIGINT, SIGHUP, or SIGUSR1, which Slurm sends before its time limit."""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType

import torch
from accelerate import Accelerator

from fastp3o.packing.packed_row import to_device
from fastp3o.run.device_clock import LateNumbers

ONE_REQUEST = 3.0  # seconds
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class StoppedError(SystemExit):
    """A signal has ended the run, and its state is saved. The exit status is 128 plus the signal's
    number. number: of the signal. place: where the run continues from, in words.
    """

    def __init__(self, number: int, place: str):
        super().__init__(128 + number)
        self.number, self.place = number, place


class Stops:
    """Notes the first signal, so that the loop can stop at a point from which it can be resumed. A
    later signal ends the process at once.

    One request may arrive twice: from the terminal or Slurm at every process, and from torchrun at
    its workers. Signals that were ignored (by nohup, or in the background of a shell) stay ignored.
    Processes that the run forks, such as a reward's workers, have the handlers from before the run.
    """

    def __init__(self, accelerator: Accelerator):
        self.accelerator, self.process = accelerator, os.getpid()
        self.received, self.received_at = 0, 0.0
        self.before: dict[signal.Signals, object] = {}
        self.exchange: LateNumbers | None = None  # of all processes, at the last call of `agreed`

    def __enter__(self) -> "Stops":
        # Python runs handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self.before[number] = signal.signal(number, self.note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self.before = {}

    def note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self.process:
            signal.signal(number, self.before[signal.Signals(number)])  # type: ignore[arg-type]
            os.kill(os.getpid(), number)
            return
        if self.received:
            if time.monotonic() - self.received_at > ONE_REQUEST:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        self.received, self.received_at = number, time.monotonic()
        name = signal.Signals(number).name
        line = f"\n{name}: stopping as soon as the run can be resumed from there; again in 3 s to stop at once\n"
        with suppress(OSError):  # nobody reads it
            os.write(2, line.encode())

    def agreed(self, due: bool, written: bool) -> tuple[int, bool, bool]:
        """The signal that any process has received (0: none), whether something is due on any, and
        whether all have written their parts. A collective. Several processes have the answer of the
        call before: then no host waits for the device.
        """
        if self.accelerator.num_processes == 1:
            return self.received, due, written
        flags = torch.tensor([[float(self.received), float(due), float(not written)]])
        flags = to_device(flags, self.accelerator.device)
        before, self.exchange = self.exchange, LateNumbers(self.accelerator.gather(flags).amax(0))
        number, any_due, any_writes = (0, False, True) if before is None else before.read()
        return int(number), bool(any_due), not any_writes
