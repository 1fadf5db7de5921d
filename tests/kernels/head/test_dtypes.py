"""Products of the head on every kind of device."""

from types import SimpleNamespace

import pytest
import torch

from fastp3o_kernels.head.head import HeadDtypes, multiply


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_half_operands_stay_half_where_their_products_are_fp32(device, half, monkeypatch):
    hidden = SimpleNamespace(device=SimpleNamespace(type=device), dtype=half)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    expected = half if device == "cuda" else torch.float32
    assert HeadDtypes.for_hidden(hidden) == (half, expected, torch.float32)


@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
def test_products_are_added_to_what_is_there(operands):
    a, b = torch.ones(2, 3, dtype=operands), torch.ones(3, 4, dtype=operands)
    out = torch.ones(2, 4)
    multiply(a, b, out=out, accumulate=True)
    assert (out == 4).all()
    multiply(a, b, out=out)
    assert (out == 3).all()
