"""Each rule of the pretended device, by a case that breaks it."""

import pytest
import torch
import triton
import triton.language as tl

from tests.simulated_cuda.host import recorded


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32, device="cuda").view(2, 3)


@triton.jit
def double_kernel(values_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(values_ptr + index, 2 * tl.load(values_ptr + index))


def test_tensors_of_two_devices_do_not_mix(x):
    for operation in (
        lambda: x + torch.ones(2, 3),
        lambda: x @ torch.ones(3, 3),
        lambda: x + x.to("cuda:1"),
    ):
        with pytest.raises(RuntimeError, match="at least two devices"):
            operation()
    assert (x + torch.tensor(1.0)).device == x.device  # a number may
    with pytest.raises(RuntimeError, match="illegal memory access"), torch.cuda.device(1):
        double_kernel[(1,)](x, BLOCK=2)


WAITS = {
    "item": lambda x: x.sum().item(),
    "cpu": lambda x: x.cpu(),
    "mask": lambda x: x[x > 1],
    "an assignment by a mask": lambda x: x.__setitem__(x > 1, x[:1].flatten()[:1].expand(4)),
    "indices of the CPU": lambda x: x[torch.tensor([0, 1])],
    "many to look among": lambda x: torch.isin(x, torch.arange(40.0, device="cuda")),
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2], device="cuda"), 0),
    "pageable": lambda x: torch.zeros(3).to("cuda", non_blocking=True),
    "pinned, but blocking": lambda x: torch.zeros(3).pin_memory().to("cuda"),
}
NO_WAITS = {
    "few to look among": lambda x: torch.isin(x, torch.arange(3.0, device="cuda")),
    "a number by a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "indices of the device": lambda x: x[torch.arange(2, device="cuda")],
    "repeats of a known size": lambda x: x.repeat_interleave(
        torch.ones(2, device="cuda").long(), 0, output_size=2
    ),
    "pinned": lambda x: torch.zeros(3).pin_memory().to("cuda", non_blocking=True),
    "to the host, late": lambda x: x.to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("name", WAITS | NO_WAITS)
def test_waits_are_noted_and_raise_where_they_must_not_be(x, name):
    operation = (WAITS | NO_WAITS)[name]
    with recorded() as record:
        operation(x)
    assert bool(record.waits) == (name in WAITS)
    torch.cuda.set_sync_debug_mode("error")
    if name in WAITS:
        assert record.waits[0][1].file == "tests/simulated_cuda/cases/rules.py"
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            operation(x)
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.graph(torch.cuda.CUDAGraph())
        with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), graph:
            operation(x)


def test_copies_are_late(x):
    late, event = x.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    assert late.isnan().all()
    event.synchronize()
    assert torch.equal(late, torch.arange(6.0).view(2, 3))
    source = torch.zeros(3).pin_memory()
    source.to("cuda", non_blocking=True)
    source.fill_(1.0)
    with pytest.raises(RuntimeError, match="pinned memory has changed"):
        torch.cuda.synchronize()


def test_a_graph_replays_on_the_same_memory(x):
    out, one, graph = (
        torch.zeros(2, 3, device="cuda"),
        torch.ones(3, device="cuda"),
        torch.cuda.CUDAGraph(),
    )
    with torch.cuda.graph(graph):
        y = x + one
        out.add_(y)
        double_kernel[(1,)](out, BLOCK=2)
    assert not out.any()  # a capture runs nothing
    x.mul_(0)
    with recorded() as record:
        graph.replay()
        graph.replay()
    assert record.launches == {"graph": 2}
    assert out.tolist() == [[6.0, 6.0, 2.0], [2.0, 2.0, 2.0]]
    del one
    with pytest.raises(RuntimeError, match="memory that has been freed"):
        graph.replay()


def test_torchs_own_rms_norm_and_its_gradients():
    """CUDA has it in one kernel, and torch built for a CPU in pieces from 2.13 on."""
    x, weight, grad = torch.randn(3, 8), torch.randn(8), torch.randn(3, 8)
    found = []
    for device in ("cpu", "cuda"):
        leaves = [tensor.detach().to(device).requires_grad_() for tensor in (x, weight)]
        result = torch.nn.functional.rms_norm(leaves[0], (8,), leaves[1], 1e-6)
        found.append([result, *torch.autograd.grad(result, leaves, grad.to(device))])
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got.detach().cpu(), expected.detach())
