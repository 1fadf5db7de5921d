"""Tests when a step is captured; the capture itself needs a GPU."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from fastp3o.rollouts import steps as steps_module
from fastp3o.rollouts.steps import StepGraph


class FakeGraph:
    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1


@pytest.fixture
def captures(monkeypatch) -> list[FakeGraph]:
    """Graphs that were captured, in place of torch's."""
    captured = []
    stream = SimpleNamespace(wait_stream=lambda _: None)

    def capturing(fake, *, stream, capture_error_mode):
        assert capture_error_mode == "thread_local"
        captured.append(fake)
        return nullcontext()

    fake_cuda = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda _: nullcontext(),
        synchronize=lambda: None,
        CUDAGraph=FakeGraph,
        graph=capturing,
    )
    monkeypatch.setattr(steps_module.torch, "cuda", fake_cuda)
    return captured


def test_a_graph_serves_until_a_tensor_moves(captures):
    weight, steps = torch.zeros(3), []
    step_graph = StepGraph()

    def step():
        steps.append(weight.sum())

    advance = step_graph.ready(step, [weight])
    # Two steps as they come, and the one that is captured.
    assert (len(steps), len(captures)) == (3, 1)
    advance()
    weight.add_(1.0)
    step_graph.ready(step, [weight])()
    assert (len(steps), captures[0].replays) == (3, 2)
    weight.data = torch.ones(3)
    step_graph.ready(step, [weight])()
    assert (len(steps), len(captures), captures[1].replays) == (6, 2, 1)


def test_a_step_that_cannot_be_captured_runs_uncaptured_and_says_why_once(captures, monkeypatch):
    said, steps = [], []
    monkeypatch.setattr(steps_module.logger, "warning", said.append)

    def step():
        if captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        steps.append(None)

    step_graph = StepGraph()
    assert step_graph.ready(step, []) is step
    assert step_graph.ready(step, []) is step
    assert len(steps) == 2
    (message,) = said
    assert "without a CUDA graph" in message
    assert "operation not permitted when stream is capturing" in message
