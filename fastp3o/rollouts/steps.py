"""Captures a step of the engine as a CUDA graph."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers.utils.logging import get_logger

logger = get_logger(__name__)


class StepGraph:
    """Captures a step as a CUDA graph, which launches all its kernels together instead of one by
    one from Python. The step must keep everything in tensors that it changes in place. A graph
    knows tensors by their addresses, so a step is captured again once one has moved; weights may
    change in place between replays.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.addresses: list[int] = []
        self.captures = 0  # so far
        self.fails = False

    def ready(self, step: Callable[[], None], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """A function that does one step, valid until a tensor moves. Capturing does up to two steps
        first. step: runs on the current stream, and never reads the device. One that fails on its
        way must have changed nothing that the next one would not write again. tensors: all that it
        uses and that outlive it.
        """
        if self.fails:
            return step
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.graph is None or addresses != self.addresses:
            self.graph = None  # gives its memory back before the next one takes any
            with torch.cuda.device(self.device):
                self.graph, self.addresses = self.capture(step), addresses
            self.captures += self.graph is not None
            if self.captures > 1:
                logger.info(
                    f"a step was captured again, since memory that it uses has moved: {self.captures} captures so far"
                )
        return step if self.graph is None else self.graph.replay

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """Captures the step on the current device. Returns None, after a warning, if the step waits
        for the device.
        """
        current, side = torch.cuda.current_stream(), side_stream(torch.cuda.current_device())
        graph = torch.cuda.CUDAGraph()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                # Libraries set themselves up in it and kernels are compiled, which a capture
                # forbids.
                step()
                try:
                    # A capture that fails cannot be undone with every torch, so it is not begun.
                    with waits_forbidden():
                        step()
                except Exception as error:  # whatever a model does that a graph cannot hold
                    self.fails = True
                    torch.cuda.synchronize()
                    logger.warning(
                        f"sampling runs without a CUDA graph, several times slower: a step failed: {error}"
                    )
                    return None
            # Only this thread is watched: NCCL's own thread may ask for its events meanwhile.
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                step()
        finally:
            current.wait_stream(side)
        return graph


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of all captures. It is shared, because libraries keep a workspace of tens of
    megabytes for each stream.
    """
    return torch.cuda.Stream(device)


@contextmanager
def waits_forbidden() -> Iterator[None]:
    """Within the block, torch raises an error wherever the host would wait for the device."""
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
