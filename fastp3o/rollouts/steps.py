"""A step of the engine as a CUDA graph."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch.cuda.memory import _cuda_endAllocateToPool, _cuda_releasePool
from transformers.utils.logging import get_logger

logger = get_logger(__name__)


class StepGraph:
    """Captures a step as a CUDA graph, which launches all its kernels together instead of one by one from Python.

    The step must keep everything in tensors that it changes in place. A graph knows tensors by their addresses, so a
    step is captured again once one has moved; weights may change in place between replays.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.addresses: list[int] = []
        self.fails = False

    def ready(self, step: Callable[[], None], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """A function that does one step, valid until a tensor moves. Capturing does up to two steps first.

        step: runs on the current stream, and never reads the device. One that fails on its way must have changed
        nothing that the next one would not write again. tensors: all that it uses and that outlive it.
        """
        if self.fails:
            return step
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.graph is None or addresses != self.addresses:
            self.graph = None  # gives its memory back before the next one takes any
            with torch.cuda.device(self.device):
                self.graph, self.addresses = self.capture(step), addresses
        return step if self.graph is None else self.graph.replay

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Captures the step on the current device. Returns None, after a warning, if that fails."""
        device, current = torch.cuda.current_device(), torch.cuda.current_stream()
        side, graph, pool = side_stream(device), torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                # Libraries set themselves up in it and kernels are compiled, which a capture forbids.
                step()
            try:
                # A capture that fails costs more than one that is not begun.
                with torch.cuda.stream(side), waits_forbidden():
                    step()
                try:
                    # Only this thread is watched: NCCL's own thread may ask for its events meanwhile.
                    with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
                        step()
                except Exception:
                    end_capture(graph, pool, current)
                    raise
            except Exception as error:  # whatever a model does that a graph cannot hold
                self.fails = True
                torch.cuda.synchronize()
                # Ending a capture that has failed raises an error of its own.
                logger.warning(
                    "sampling runs without a CUDA graph, several times slower: capturing a step failed with: "
                    f"{error.__context__ or error}"
                )
                return None
        finally:
            current.wait_stream(side)
        return graph


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures: libraries keep a workspace of tens of megabytes for each stream."""
    return torch.cuda.Stream(device)


@contextmanager
def waits_forbidden() -> Iterator[None]:
    """Within the block torch raises where the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def end_capture(graph: torch.cuda.CUDAGraph, pool: Any, current: torch.cuda.Stream) -> None:
    """Ends what torch 2.11 leaves begun where ending a capture raises: the stream, the allocator's pool, without whose
    end memory can no more be given back, and the generator's capture, in which it refuses to draw.
    """
    torch.cuda.set_stream(current)
    device = torch.cuda.current_device()
    with suppress(RuntimeError):  # raised if the capture did end, and its pool with it
        _cuda_endAllocateToPool(device, pool)
        _cuda_releasePool(device, pool)
    graph.reset()
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
