"""Tests when a step is captured, and what a failure leaves; the capture itself needs a GPU."""

from contextlib import contextmanager

import pytest
import torch

from fastp3o.rollouts import steps as steps_module
from fastp3o.rollouts.steps import StepGraph

DEVICE = torch.device("cuda")


class FakeGraph:
    def __init__(self):
        self.replays, self.has_failed, self.was_reset = 0, False, False

    def replay(self):
        self.replays += 1

    def reset(self):
        self.was_reset = True


class FakeStream:
    def __init__(self, device=0):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


class FakeGenerator:
    def __init__(self):
        self.capturing = False

    def clone_state(self):
        return FakeGenerator()

    def graphsafe_set_state(self, state):
        self.capturing = state.capturing


class FakeCuda:
    """What a capture needs of `torch.cuda`, with what torch 2.11 leaves behind if ending one fails.

    waits: to be called by a step where it waits for the device.
    """

    Stream, CUDAGraph = FakeStream, FakeGraph

    def __init__(self):
        self.default_stream = self.current = FakeStream()
        self.streams, self.captured, self.pools = [], [], set()
        self.default_generators = [FakeGenerator()]
        self.mode, self.is_capturing, self.is_broken = 1, False, False

    def current_device(self):
        return 0

    @contextmanager
    def device(self, device):
        yield

    def current_stream(self):
        return self.current

    def set_stream(self, stream):
        self.current = stream

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

    def synchronize(self):
        assert not self.is_capturing

    def graph_pool_handle(self):
        return (0, 1)

    def empty_cache(self):
        assert not self.pools

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        self.empty_cache()
        self.current, before = stream, self.current
        self.pools.add(pool)
        self.default_generators[0].capturing = self.is_capturing = True
        self.captured.append(graph)
        try:
            yield
        finally:
            self.is_capturing = False
            if self.is_broken:
                graph.has_failed = True
                raise RuntimeError("operation failed due to a previous error during capture")
            self.pools.remove(pool)
            self.default_generators[0].capturing = False
            self.current = before

    def end_pool(self, device, pool):
        if pool not in self.pools:
            raise RuntimeError("not currently recording to this pool")
        self.pools.remove(pool)

    def waits(self):
        if self.is_capturing:
            self.is_broken = True
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.mode == 2:
            raise RuntimeError("called a synchronizing CUDA operation")


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    fake = FakeCuda()
    released = []
    monkeypatch.setattr(steps_module.torch, "cuda", fake)
    monkeypatch.setattr(steps_module, "_cuda_endAllocateToPool", fake.end_pool)
    monkeypatch.setattr(steps_module, "_cuda_releasePool", lambda *given: released.append(given))
    fake.released = released
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
    assert (len(steps), cuda.captured[0].replays) == (3, 2)
    weight.data = torch.ones(3)
    step_graph.ready(step, [weight])()
    assert (len(steps), len(cuda.captured), cuda.captured[1].replays) == (6, 2, 1)
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
    (message,) = said
    assert "without a CUDA graph" in message
    assert "synchronizing CUDA operation" in message


def test_a_capture_that_fails_leaves_nothing_behind_and_says_why_once(cuda, said):
    steps = []

    def step():
        if cuda.is_capturing:
            cuda.waits()
        steps.append(None)

    step_graph = StepGraph(DEVICE)
    assert step_graph.ready(step, []) is step
    assert step_graph.ready(step, []) is step
    assert len(steps) == 2
    (graph,) = cuda.captured
    assert graph.has_failed
    assert graph.was_reset
    assert cuda.current is cuda.default_stream
    assert cuda.released == [(0, (0, 1))]
    assert not cuda.default_generators[0].capturing
    cuda.empty_cache()
    (message,) = said
    assert "without a CUDA graph" in message
    assert "operation not permitted when stream is capturing" in message


def test_so_does_a_step_that_fails_without_the_capture(cuda, said):
    def step():
        if cuda.is_capturing:
            raise ValueError("not in a graph")

    assert StepGraph(DEVICE).ready(step, []) is step
    assert cuda.released == []
    assert cuda.current is cuda.default_stream
    cuda.empty_cache()
    assert "not in a graph" in said[0]


def test_the_first_step_is_not_excused(cuda, said):
    def step():
        raise MemoryError("none is left")

    with pytest.raises(MemoryError):
        StepGraph(DEVICE).ready(step, [])
    assert cuda.current is cuda.default_stream
    assert not said


def test_torch_has_what_ends_a_failed_capture():
    """They are torch's own, not its interface."""
    memory = torch.cuda.memory
    assert callable(memory._cuda_endAllocateToPool)
    assert callable(memory._cuda_releasePool)
    assert {"clone_state", "graphsafe_set_state"} <= set(dir(torch.Generator))
