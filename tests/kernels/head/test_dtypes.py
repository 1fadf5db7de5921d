"""Products of the head on every kind of device."""

from types import SimpleNamespace

import pytest
import torch

from fastp3o_kernels.head.head import HeadDtypes


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
def test_half_operands_stay_half_where_their_products_are_fp32(device, half, monkeypatch):
    hidden = SimpleNamespace(device=SimpleNamespace(type=device), dtype=half)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    expected = half if device == "cuda" else torch.float32
    assert HeadDtypes.for_hidden(hidden) == (half, expected, torch.float32)
