"""oneDNN's products against fp64 arithmetic, on any processor that has it, and the choice between
them and torch's.
"""

import os
import stat
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastp3o_kernels import onednn
from fastp3o_kernels.head.head import multiply
from fastp3o_kernels.onednn import Faster
from tests.kernels.problems import relative_error

pytestmark = pytest.mark.skipif(not onednn.AVAILABLE, reason="torch has no oneDNN, or no MKL")
ALL = Faster(True, True, True)


@pytest.fixture
def quick(monkeypatch):
    for name, value in {
        "chosen": ALL,
        "LEAST": 0,
        "FEWEST": 0,
        "PART": 30,
        "MOST_ROWS": 5,
        "LEAST_TURNED": 2,
    }.items():
        monkeypatch.setattr(onednn, name, value)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """A user's cache in which nothing is kept, and a process that has not chosen."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(onednn, "chosen", None)
    return tmp_path


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.compiled)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (37, 3), (130, 1)])
def test_a_linear_layer_and_its_gradients(bias, compiles, shape, quick):
    layer = nn.Linear(19, 45, bias=bias)
    onednn.use_onednn(nn.ModuleList([layer]))
    given, incoming = (
        torch.randn(19, *shape).movedim(0, -1).requires_grad_(),
        torch.randn(*shape, 45),
    )
    inputs = [given, *layer.parameters()]
    output = (torch.compile(layer, dynamic=True) if compiles else layer)(given)
    assert output.grad_fn.name() == (
        "CompiledFunctionBackward" if compiles else "LinearProductBackward"
    )
    exact = F.linear(*(tensor.double() for tensor in inputs))
    for got, expected in zip(
        (output, *torch.autograd.grad(output, inputs, incoming)),
        (exact, *torch.autograd.grad(exact, inputs, incoming.double())),
        strict=True,
    ):
        assert got.dtype == torch.float32
        assert relative_error(got, expected) < 1e-6
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(given).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(1, 7, 12), (13, 64, 3), (6, 1, 17)])
@pytest.mark.parametrize("accumulate", [True, False])
def test_a_product_is_added_in_parts(accumulate, shape, quick):
    n, k, m = shape
    a, b, out = torch.randn(k, n).T, torch.randn(m, 2 * k)[:, ::2].T, torch.randn(n, m + 3)[:, :m]
    expected = a.double() @ b.double() + (out.double() if accumulate else 0)
    multiply(a, b, out, accumulate=accumulate)
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("slow", [None, "logits", "dhidden", "dweight"])
def test_what_is_slow_when_it_is_timed_is_left_to_torch(slow, cache, monkeypatch):
    """Each of the three products by itself, whatever the processor's name. torch's are made slow
    for the others.
    """

    def slower(multiply, are):
        def multiplied(a, b, out, **options):
            form = "dweight" if a.stride(0) == 1 else "logits" if b.stride(0) == 1 else "dhidden"
            if are == (form == slow):
                time.sleep(0.003)
            return multiply(a, b, out=out, **options)

        return multiplied

    monkeypatch.setattr(onednn, "multiply", slower(onednn.multiply, are=True))
    monkeypatch.setattr(torch, "mm", slower(torch.mm, are=False))
    assert onednn.choice() == Faster(**{form: form != slow for form in Faster._fields})


@pytest.mark.parametrize("form", Faster._fields)
def test_parts_of_many_tokens_are_neither_narrow_nor_large(form, monkeypatch):
    """Parts of a few columns took twice the time of torch's product at 8,192 tokens of one prompt."""
    N, D, V, shapes = 8192, 256, 2048, []

    def noted(a, b):
        shapes.append((*a.shape, b.shape[1]))
        return a.new_zeros(len(a), b.shape[1])

    monkeypatch.setattr(onednn, "product", noted)
    hidden, weight, dlogits = torch.ones(N, D), torch.ones(V, D), torch.ones(N, V)
    a, b = {
        "logits": (hidden, weight.T),
        "dhidden": (dlogits, weight),
        "dweight": (dlogits.T, hidden),
    }[form]
    onednn.multiply(a, b, torch.empty(len(a), b.shape[1]), accumulate=False)
    assert sum(n * k * m for n, k, m in shapes) == N * D * V
    for n, k, m in shapes:
        assert min(n, k, m) >= 128
        assert n * m <= onednn.PART
        assert form != "dweight" or n * k <= N * onednn.LEAST_TURNED


def linear_and_head(rows, layer, weight):
    """Each product of a layer and a head once."""
    rows = rows.detach().requires_grad_()
    layer(rows).sum().backward()
    with torch.no_grad():
        layer(rows)
    dlogits, (out, dhidden) = (
        torch.ones(len(rows), len(weight)),
        (torch.empty(len(rows), n) for n in weight.shape),
    )
    for a, b, result in (
        (rows, weight.T, out),
        (dlogits, weight, dhidden),
        (dlogits.T, rows, torch.empty_like(weight)),
    ):
        multiply(a.detach(), b.detach(), result)


@pytest.mark.parametrize("form", Faster._fields)
def test_each_product_of_a_head_and_of_a_layer_follows_its_choice(form, quick, monkeypatch):
    calls = []
    product = onednn.product
    monkeypatch.setattr(
        onednn, "product", lambda *operands: calls.append(operands) or product(*operands)
    )
    monkeypatch.setattr(onednn, "PART", 10**6)
    monkeypatch.setattr(onednn, "LEAST_TURNED", 100)
    layer, rows, weight = nn.Linear(8, 12), torch.randn(5, 8), torch.randn(12, 8)
    for choice, expected in (
        (Faster(), 0),
        (Faster(**{form: True}), 2 + (form == "logits")),
        (ALL, 7),
    ):
        monkeypatch.setattr(onednn, "chosen", choice)
        onednn.use_onednn(nn.ModuleList([layer]))
        calls.clear()
        linear_and_head(rows, layer, weight)
        assert len(calls) == expected


def test_few_tokens_leave_the_gradient_of_a_head_to_torch(quick, monkeypatch):
    monkeypatch.setattr(onednn, "FEWEST", 6)
    dlogits, hidden = torch.ones(5, 12), torch.ones(5, 8)
    assert onednn.is_chosen(dlogits, torch.ones(12, 8))
    assert not onednn.is_chosen(dlogits.T, hidden)


def test_timing_meets_no_mode_of_its_caller_and_draws_no_random_numbers(cache, monkeypatch):
    seen = []
    monkeypatch.setattr(onednn, "TURNS", 1)
    multiply = onednn.multiply

    def noted(a, b, out, **options):
        seen.append(
            (
                torch.is_inference_mode_enabled(),
                torch.is_autocast_enabled("cpu"),
                out.device.type,
                out.dtype,
            )
        )
        return multiply(a, b, out, **options)

    monkeypatch.setattr(onednn, "multiply", noted)
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        onednn.choice()
    assert seen == 3 * [(False, False, "cpu", torch.float32)]
    assert torch.equal(torch.get_rng_state(), state)


def test_a_later_start_takes_the_choice_of_the_first_one(cache, monkeypatch):
    """So do a run that is resumed, and another of the same seed: other products round differently."""
    first = Faster(logits=True)
    monkeypatch.setattr(onednn, "measured", lambda: first)
    assert onednn.choice() == first
    monkeypatch.setattr(onednn, "chosen", None)
    monkeypatch.setattr(onednn, "measured", lambda: pytest.fail("it was measured again"))
    assert onednn.choice() == first
    (kept,) = cache.rglob("*.json")
    kept.write_text("{")  # as a loss of power may leave it
    monkeypatch.setattr(onednn, "chosen", None)
    monkeypatch.setattr(onednn, "measured", lambda: ALL)
    assert onednn.choice() == ALL == onednn.kept(kept)
    assert [*kept.parent.iterdir()] == [kept]


@pytest.mark.parametrize("changed", ["torch", "threads", "processor"])
def test_another_processor_torch_or_number_of_threads_chooses_for_itself(
    changed, cache, monkeypatch
):
    before = onednn.kept_at()
    if changed == "torch":
        monkeypatch.setattr(torch, "__version__", "0")
    elif changed == "threads":
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    else:
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda: {"cpu_name": "another"}, raising=False
        )
    assert onednn.kept_at() != before
    assert onednn.kept_at().parent == before.parent == cache / "fastp3o"


def test_without_a_place_to_keep_it_the_choice_is_measured(cache, monkeypatch):
    monkeypatch.setattr(onednn, "measured", lambda: ALL)
    (cache / "fastp3o").write_text("a file where the folder would be")
    assert onednn.choice() == ALL


START = """
import sys, time
from fastp3o_kernels import onednn

def measured(flag=sys.argv[1] == "1"):
    time.sleep(0.3)  # all of them are measuring before the first one is done
    return onednn.Faster(flag, flag, flag)

onednn.measured = measured
print(onednn.choice())
"""


def test_processes_that_start_together_agree(cache):
    """Those of one run share what they compute, even where each of them measures something else."""
    command = [sys.executable, "-c", START]
    begun = [
        subprocess.Popen([*command, str(n % 2)], stdout=subprocess.PIPE, text=True)
        for n in range(4)
    ]
    assert len({process.communicate()[0] for process in begun}) == 1
    assert all(process.returncode == 0 for process in begun)
    (kept,) = cache.rglob("*.json")
    assert stat.S_IMODE(os.stat(kept).st_mode) & 0o400
