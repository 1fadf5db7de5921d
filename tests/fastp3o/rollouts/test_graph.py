"""Tests when a step is captured, and what a failure leaves; the capture itself needs a GPU."""

from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch

from fastp3o.rollouts import steps as steps_module
from fastp3o.rollouts.steps import StepGraph

DEVICE = torch.device("cuda")


class FakeStream:
    def __init__(self, device=0):
        self.waited_for = []
        self.wait_stream = self.waited_for.append


class FakeCuda:
    """What a capture needs of `torch.cuda`. waits: to be called by a step where it waits for the device."""

    Stream, CUDAGraph, device = FakeStream, Mock, nullcontext
    synchronize = Mock()

    def __init__(self):
        self.default_stream = self.current = FakeStream()
        self.captured = []
        self.mode = 1

    def current_device(self):
        return 0

    def current_stream(self):
        return self.current

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def get_sync_debug_mode(self):
        return self.mode

    def set_sync_debug_mode(self, mode):
        self.mode = {"error": 2}.get(mode, mode)

    def graph(self, graph, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.captured.append(graph)
        return self.stream(stream)

    def waits(self):
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(steps_module.torch, "cuda", fake)
    steps_module.side_stream.cache_clear()
    yield fake
    steps_module.side_stream.cache_clear()


@pytest.fixture
def said(monkeypatch) -> list[str]:
    warnings: list[str] = []
    monkeypatch.setattr(steps_module.logger, "warning", warnings.append)
    return warnings


def test_a_graph_serves_until_a_tensor_moves(cuda):
    weight, steps = torch.zeros(3), []
    step_graph = StepGraph(DEVICE)

    def step():
        steps.append(cuda.current)

    advance = step_graph.ready(step, [weight])
    # Two steps as they come, and the one that is captured.
    assert (len(steps), len(cuda.captured)) == (3, 1)
    advance()
    weight.add_(1.0)
    step_graph.ready(step, [weight])()
    assert (len(steps), cuda.captured[0].replay.call_count) == (3, 2)
    weight.data = torch.ones(3)
    step_graph.ready(step, [weight])()
    assert (len(steps), len(cuda.captured), cuda.captured[1].replay.call_count) == (6, 2, 1)
    # All captures share a stream, each waits for the work before it, and the work after it for that.
    (side,) = set(steps)
    assert side is not cuda.default_stream
    assert side.waited_for == [cuda.default_stream] * 2
    assert cuda.default_stream.waited_for == [side] * 2
    assert (cuda.current, cuda.mode) == (cuda.default_stream, 1)


def test_a_step_that_waits_is_not_captured(cuda, said):
    steps = []

    def step():
        cuda.waits()
        steps.append(None)

    step_graph = StepGraph(DEVICE)
    assert step_graph.ready(step, []) is step
    assert step_graph.ready(step, []) is step
    assert (len(steps), len(cuda.captured)) == (1, 0)
    assert (cuda.current, cuda.mode) == (cuda.default_stream, 1)
    assert ["synchronizing CUDA operation" in message for message in said] == [True]


def test_the_first_step_is_not_excused(cuda, said):
    with pytest.raises(MemoryError):
        StepGraph(DEVICE).ready(Mock(side_effect=MemoryError), [])
    assert cuda.current is cuda.default_stream
    assert not said
