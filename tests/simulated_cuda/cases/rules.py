"""Each rule of the pretended device, by a case that breaks it."""

import copy
import ctypes
import faulthandler
import gc
import os
import signal

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from tests.simulated_cuda.record import recorded


@pytest.fixture
def x() -> torch.Tensor:
    return torch.arange(6, dtype=torch.float32, device="cuda").view(2, 3)


@triton.jit
def double_kernel(values_ptr, BLOCK: tl.constexpr):
    index = tl.arange(0, BLOCK)
    tl.store(values_ptr + index, 2 * tl.load(values_ptr + index))


def test_tensors_of_the_cpu_and_the_device_do_not_mix(x):
    for operation in (torch.add, torch.matmul, torch.where):
        given = (x > 1, x) if operation is torch.where else (x,)
        with pytest.raises(RuntimeError, match="at least two devices"):
            operation(*given, torch.ones(3, 3) if operation is torch.matmul else torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.cat([x, torch.zeros(1, 3)])
    assert (x + torch.tensor(1.0)).device == x.device  # a number may


def test_two_devices_do_not_mix(x):
    with pytest.raises(RuntimeError, match="at least two devices"):
        x + x.to("cuda:1")
    with torch.cuda.device(1):
        assert torch.zeros(1, device="cuda").device == torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "an assignment by a mask": lambda x: x.__setitem__(x > 1, x[:1].flatten()[:1].expand(4)),
    "indices of the CPU": lambda x: x[torch.tensor([0, 1])],
    "repeats": lambda x: x.repeat_interleave(torch.tensor([1, 2], device="cuda"), 0),
    "pageable": lambda x: torch.zeros(3).to("cuda", non_blocking=True),
    "a list": lambda x: torch.tensor([1, 2], device="cuda"),
    "pinned, but blocking": lambda x: torch.zeros(3).pin_memory().to("cuda"),
    "synchronize": lambda x: torch.cuda.synchronize(),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.flatten().long().bincount(),
}
NO_WAITS = {
    "arithmetic": lambda x: (x @ x.T).softmax(-1).sum(),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0.0),
    "a number by a mask": lambda x: x.__setitem__(x > 1, 0.0),
    "indices of the device": lambda x: x[torch.arange(2, device="cuda")],
    "repeats of a known size": lambda x: x.repeat_interleave(torch.ones(2, device="cuda").long(), 0, output_size=2),
    "pinned": lambda x: torch.zeros(3).pin_memory().to("cuda", non_blocking=True),
    "to the host, late": lambda x: x.to("cpu", non_blocking=True),
    "full": lambda x: torch.full((2,), 3.0, device="cuda"),
}


@pytest.mark.parametrize("operation", WAITS.values(), ids=WAITS)
def test_waits_are_noted_and_raise_where_they_must_not_be(x, operation):
    with recorded() as record:
        operation(x)
    assert record.waits
    assert record.waits[0].place.file == "tests/simulated_cuda/cases/rules.py"
    torch.cuda.set_sync_debug_mode("error")
    with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
        operation(x)


@pytest.mark.parametrize("operation", NO_WAITS.values(), ids=NO_WAITS)
def test_other_operations_do_not_wait(x, operation):
    with recorded() as record:
        operation(x)
    assert not record.waits


def test_a_copy_that_nobody_has_waited_for_is_poison(x):
    late, event = x.to("cpu", non_blocking=True), torch.cuda.Event()
    event.record()
    assert late.isnan().all()
    assert not event.query()
    event.synchronize()
    assert torch.equal(late, torch.arange(6.0).view(2, 3))
    target = torch.zeros(2, 3).pin_memory()
    target.copy_(x, non_blocking=True)
    assert target.isnan().all()
    torch.cuda.synchronize()
    assert torch.equal(target, late)


def test_pinned_memory_must_not_change_before_its_copy_is_over():
    source = torch.zeros(3).pin_memory()
    source.to("cuda", non_blocking=True)
    source.fill_(1.0)
    with pytest.raises(RuntimeError, match="pinned memory has changed"):
        torch.cuda.synchronize()


def test_launches_are_counted(x):
    with recorded() as record:
        y = (x * 2).view(3, 2).T
        torch._foreach_add_([y, x], 1.0)
        torch.empty_like(x)
    assert record.launches == {"aten.mul.Tensor": 1, "aten._foreach_add_.Scalar": 1}


def test_a_record_outlives_an_equal_one_inside(x):
    with recorded() as outer:
        with recorded():
            pass
        x.sum().item()
    assert len(outer.waits) == 1


def test_a_graph_replays_on_the_same_memory(x):
    out, graph = torch.zeros(2, 3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        out.add_(y)
        double_kernel[(1,)](out, BLOCK=2)
    assert not out.any()  # a capture runs nothing
    x.mul_(0)
    graph.replay()
    graph.replay()
    assert out.tolist() == [[6.0, 6.0, 2.0], [2.0, 2.0, 2.0]]


@pytest.mark.parametrize(
    "forbidden", [lambda x: x.sum().item(), lambda x: torch.tensor([1.0], device="cuda"), lambda x: x[x > 1]]
)
def test_a_capture_refuses_waits_and_leaves_what_torch_leaves(x, forbidden):
    before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="failed due to a previous error"), torch.cuda.graph(graph):
        forbidden(x)
    assert torch.cuda.current_stream() != before
    with pytest.raises(RuntimeError, match="INTERNAL ASSERT"):
        torch.cuda.empty_cache()


def test_a_graph_whose_memory_is_gone_raises():
    x, graph = torch.ones(3, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    del x
    with pytest.raises(RuntimeError, match="memory that has been freed"):
        graph.replay()
    assert y.shape == (3,)


def test_kernels_take_tensors_of_the_current_device(x):
    with recorded() as record:
        double_kernel[(1,)](x, BLOCK=2)
    assert record.launches == {"triton double_kernel": 1}
    assert x.tolist() == [[0.0, 2.0, 2.0], [3.0, 4.0, 5.0]]
    with pytest.raises(RuntimeError, match="illegal memory access"), torch.cuda.device(1):
        double_kernel[(1,)](x, BLOCK=2)


def test_memory_is_counted():
    gc.collect()  # what tests before have left goes now, not between two counts
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    x = torch.zeros(1000, device="cuda")
    assert torch.cuda.memory_allocated() - before == 4096
    y = x + x
    del x, y
    assert torch.cuda.memory_allocated() == before
    assert torch.cuda.max_memory_allocated() - before == 8192
    assert torch.cuda.memory_allocated(1) == 0
    torch.zeros(1000)
    assert torch.cuda.max_memory_allocated() - before == 8192


def test_modules_and_autograd():
    layer = nn.Linear(3, 2)
    expected = copy.deepcopy(layer)
    hooks: list[torch.device] = []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: hooks.append(parameter.grad.device))
    layer.to("cuda")
    layer(torch.ones(4, 3, device="cuda")).square().sum().backward()
    expected(torch.ones(4, 3)).square().sum().backward()
    assert hooks == [torch.device("cuda", 0)]
    assert torch.equal(layer.weight.grad.cpu(), expected.weight.grad)
    assert torch.equal(copy.deepcopy(layer).weight.cpu(), expected.weight)


def test_the_data_of_a_parameter_moves():
    layer = nn.Linear(3, 2).requires_grad_(False)
    weight, on_host = layer.weight, layer.weight.data
    weight.data = on_host.to("cuda")
    assert layer.weight is weight
    assert weight.device.type == "cuda"
    assert (torch.ones(1, 3, device="cuda") @ weight.T).device.type == "cuda"
    weight.data = on_host
    assert layer.weight is weight
    assert weight.device.type == "cpu"
    assert torch.equal(weight @ torch.ones(3), on_host @ torch.ones(3))


@pytest.mark.parametrize("grouped", [False, True])
def test_attentions_agree(grouped):
    from torch.nn.attention.varlen import varlen_attn

    query = torch.randn(5, 4, 8, device="cuda", requires_grad=True)
    keys = torch.randn(2, 5, 2 if grouped else 4, 8, device="cuda", requires_grad=True)
    bounds = torch.tensor([0, 5], device="cuda", dtype=torch.int32)
    wide = keys.repeat_interleave(4 // keys.shape[2], 2)
    packed = varlen_attn(query, *wide, bounds, bounds, 5, 5, window_size=(-1, 0))
    other = nn.functional.scaled_dot_product_attention(
        *(tensor.transpose(0, 1)[None] for tensor in (query, *keys)), is_causal=True, enable_gqa=grouped
    )[0].transpose(0, 1)
    torch.testing.assert_close(packed, other)
    grads = [torch.autograd.grad(result.square().sum(), (query, keys)) for result in (packed, other)]
    torch.testing.assert_close(*grads)


def test_half_precision_products_keep_fp32_results():
    a, b = (torch.randn(4, 4, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.ones(4, 4, device="cuda")
    torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    torch.testing.assert_close(out.cpu(), 1 + a.cpu().float() @ b.cpu().float())


def test_memory_past_the_end_is_guarded_and_new_memory_is_garbage():
    values = torch.empty(16, device="cuda")
    assert values.isnan().all().item()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(values.data_ptr() + values.nbytes, 1)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGSEGV


def test_inference_mode(x):
    with torch.inference_mode():
        moved = torch.arange(3).pin_memory().to(x.device, non_blocking=True)
        assert moved.device == x.device
        assert (x @ moved.float()).tolist() == [5, 14]
