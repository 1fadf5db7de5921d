"""Products of the head on every kind of device."""

from types import SimpleNamespace

import pytest
import torch

from fastp3o_kernels.head.head import HeadDtypes


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
@pytest.mark.parametrize("capable", [True, False])
def test_half_operands_stay_half_where_products_have_what_they_need(device, half, capable, monkeypatch):
    hidden = SimpleNamespace(device=SimpleNamespace(type=device), dtype=half)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": capable})
    logits = half if device == "cuda" else torch.float32
    gradients = half if device == "cpu" and half == torch.bfloat16 and capable else logits
    assert HeadDtypes.for_hidden(hidden) == (half, logits, gradients, torch.float32)
