"""A step as a CUDA graph: its kernels are launched together, instead of one by one from Python."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers.utils.logging import get_logger

logger = get_logger(__name__)


class StepGraph:
    """Captures a step, and again once a tensor that it reads or writes has moved.

    Everything that the step keeps must be in tensors that it changes in place. A graph knows them by their addresses:
    weights may change in place between replays.

    """

    def __init__(self) -> None:
        self.graph: torch.cuda.CUDAGraph | None = None
        self.addresses: list[int] = []
        self.fails = False

    def ready(self, step: Callable[[], None], tensors: Sequence[Tensor]) -> Callable[[], None]:
        """What does one step, for as long as no tensor moves. Where it captures, it does two steps before.

        step: on the current stream, without a look at the device. tensors: what it uses and lives longer than it.
        """
        if self.fails:
            return step
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self.graph is None or addresses != self.addresses:
            self.graph = None  # gives its memory back before the next one takes any
            self.graph, self.addresses = self.capture(step), addresses
        return step if self.graph is None else self.graph.replay

    def capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """None, and a warning, where the step cannot be captured."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # In the first ones libraries set themselves up and kernels are compiled, which a capture forbids.
            step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:
            # Of this thread alone: NCCL's own one may ask for its events meanwhile.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                step()
        except Exception as error:  # whatever a model does that a graph cannot hold
            self.fails = True
            torch.cuda.synchronize()
            logger.warning(
                f"sampling runs without a CUDA graph, several times slower: capturing a step failed with: {error}"
            )
            return None
        return graph
