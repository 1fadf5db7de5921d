"""The processes, precision and tokenizer of a run, made once, and the program that has started it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedTokenizerBase

from fastp3o.runtime.clock import Clock
from fastp3o.runtime.precision import Precision
from fastp3o.runtime.shares import Share

# Gets the metrics of a step, or of an evaluation, with `step`. If it returns True, the run ends
# there.
Callback = Callable[[dict[str, Any]], bool | None]


class Caller(NamedTuple):
    """A program in Python that continues after the run: another run may follow in its processes,
    and a process group that was destroyed cannot be joined again safely. on_update: called after
    each step; on_evaluation: each evaluation.
    """

    on_update: Callback | None = None
    on_evaluation: Callback | None = None


class Context(NamedTuple):
    """The processes, their arithmetic and the policy's tokenizer. mesh: None for one process;
    caller: for a command. clock: that chat templates read; None for the process's.
    """

    accelerator: Accelerator
    precision: Precision
    tokenizer: PreTrainedTokenizerBase
    mesh: DeviceMesh | None
    caller: Caller | None = None
    clock: Clock | None = None

    @property
    def share(self) -> Share:
        """The share of the rows that this process trains on."""
        return Share.of(self.mesh)

    @property
    def device(self) -> torch.device:
        return self.accelerator.device
