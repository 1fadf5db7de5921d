"""What a run finds in its process, and leaves as it was: torch's defaults, accelerate's state, other runs."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from accelerate.state import AcceleratorState, GradientState

from fastp3o.errors import UserError

RUNNING = threading.Lock()


@contextmanager
def run_surroundings() -> Iterator[None]:
    """The process as the command has it, for one run at a time."""
    with only_run(), torch_defaults(), accelerate_state():
        yield


@contextmanager
def only_run() -> Iterator[None]:
    """Raises UserError within another one, also in another thread: runs of a process share its generators of random
    numbers, its signals and accelerate's state.
    """
    if not RUNNING.acquire(blocking=False):
        raise UserError("a run trains in this process already: wait for it, or start another process")
    try:
        yield
    finally:
        RUNNING.release()


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Computes as the command does, whatever the caller has set for torch, and puts that back at the end."""
    dtype = torch.get_default_dtype()
    with ExitStack() as inside:
        inside.enter_context(torch.inference_mode(False))
        inside.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                inside.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            inside.enter_context(torch.device("cpu"))
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)


@contextmanager
def accelerate_state() -> Iterator[None]:
    """Begins with accelerate's state of a new process, for the next run may have another precision, and puts back the
    caller's, which may belong to a trainer that goes on.
    """
    states = [kind._shared_state for kind in (AcceleratorState, GradientState)]
    before = [dict(state) for state in states]
    for state in states:
        state.clear()
    try:
        yield
    finally:
        for state, content in zip(states, before, strict=True):
            state.clear()
            state.update(content)
