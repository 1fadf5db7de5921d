"""oneDNN's products against fp64 arithmetic, on any processor that has it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fastp3o_kernels import onednn
from fastp3o_kernels.head.head import multiply
from tests.kernels.problems import relative_error

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    for name, value in {"IS_FASTER": True, "LEAST": 0, "PART": 30}.items():
        monkeypatch.setattr(onednn, name, value)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.compiled)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (37, 3), (130, 1)])
def test_a_linear_layer_and_its_gradients(bias, compiles, shape):
    layer = nn.Linear(19, 45, bias=bias)
    onednn.use_onednn(nn.ModuleList([layer]))
    given, incoming = torch.randn(19, *shape).movedim(0, -1).requires_grad_(), torch.randn(*shape, 45)
    inputs = [given, *layer.parameters()]
    output = (torch.compile(layer, dynamic=True) if compiles else layer)(given)
    assert output.grad_fn.name() == ("CompiledFunctionBackward" if compiles else "LinearProductBackward")
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
def test_a_product_is_added_in_parts(accumulate, shape):
    n, k, m = shape
    a, b, out = torch.randn(k, n).T, torch.randn(m, 2 * k)[:, ::2].T, torch.randn(n, m + 3)[:, :m]
    expected = a.double() @ b.double() + (out.double() if accumulate else 0)
    multiply(a, b, out, accumulate=accumulate)
    assert relative_error(out, expected) < 1e-6
