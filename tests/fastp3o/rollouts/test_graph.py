"""Tests when a step is captured, and what a failure leaves; the capture itself needs a GPU."""

from contextlib import contextmanager
from unittest.mock import MagicMock, call

import pytest
import torch

from fastp3o.rollouts import steps as steps_module
from fastp3o.rollouts.steps import StepGraph

DEVICE = torch.device("cuda")


@pytest.fixture
def cuda(monkeypatch) -> MagicMock:
    """What a capture needs of `torch.cuda`; `streams` are those that are entered, `mode` that of waits for a device."""
    fake = MagicMock(streams=[], mode=1)

    @contextmanager
    def within(stream):
        fake.streams.append(stream)
        try:
            yield
        finally:
            fake.streams.pop()

    fake.get_sync_debug_mode.side_effect = lambda: fake.mode
    fake.set_sync_debug_mode.side_effect = lambda mode: setattr(fake, "mode", mode)
    fake.stream.side_effect = within
    fake.graph.side_effect = lambda graph, stream, capture_error_mode: within(stream)
    fake.CUDAGraph.side_effect = lambda: MagicMock()
    monkeypatch.setattr(steps_module.torch, "cuda", fake)
    monkeypatch.setattr(steps_module.logger, "warning", fake.warning)
    steps_module.side_stream.cache_clear()
    yield fake
    steps_module.side_stream.cache_clear()
    assert (fake.streams, fake.mode) == ([], 1)


def test_a_graph_serves_until_a_tensor_moves(cuda):
    weight, steps, step_graph = torch.zeros(3), [], StepGraph(DEVICE)

    def step():
        steps.append(cuda.streams[-1])

    advance = step_graph.ready(step, [weight])
    # Two steps as they come, and the one that is captured.
    assert (len(steps), cuda.graph.call_count) == (3, 1)
    first = step_graph.graph
    advance()
    weight.add_(1.0)
    step_graph.ready(step, [weight])()
    assert (len(steps), first.replay.call_count) == (3, 2)
    weight.data = torch.ones(3)
    step_graph.ready(step, [weight])()
    assert (len(steps), cuda.graph.call_count, step_graph.graph.replay.call_count) == (6, 2, 1)
    # All captures share a stream, each waits for the work before it, and the work after it for that.
    side, before = cuda.Stream.return_value, cuda.current_stream.return_value
    assert (set(steps), cuda.Stream.call_count) == ({side}, 1)
    assert side.wait_stream.call_args_list == [call(before)] * 2
    assert before.wait_stream.call_args_list == [call(side)] * 2
    assert cuda.graph.call_args.kwargs["capture_error_mode"] == "thread_local"
    assert cuda.set_sync_debug_mode.call_args_list == [call("error"), call(1)] * 2


def test_a_step_that_waits_is_not_captured_and_the_first_step_is_not_excused(cuda):
    steps, step_graph = [], StepGraph(DEVICE)

    def step():
        if cuda.mode == "error":
            raise RuntimeError("called a synchronizing CUDA operation")
        steps.append(None)

    for _ in range(2):
        assert step_graph.ready(step, []) is step
    assert (len(steps), cuda.graph.call_count) == (1, 0)
    cuda.warning.assert_called_once()
    with pytest.raises(MemoryError):
        StepGraph(DEVICE).ready(MagicMock(side_effect=MemoryError), [])
    cuda.warning.assert_called_once()
