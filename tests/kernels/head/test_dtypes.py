"""Products of the head on every kind of device."""

from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

from fastp3o_kernels.head.head import HeadDtypes, sums_in_fp32


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu", "mps"])
@pytest.mark.parametrize("capable", [True, False])
def test_half_operands_stay_half_where_products_have_what_they_need(
    device, half, capable, monkeypatch
):
    hidden = SimpleNamespace(device=SimpleNamespace(type=device), dtype=half)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": capable})
    logits = half if device == "cuda" else torch.float32
    gradients = half if device == "cpu" and half == torch.bfloat16 and capable else logits
    assert HeadDtypes.for_hidden(hidden) == (half, logits, gradients, torch.float32)


@pytest.mark.parametrize("before", [True, False])
def test_products_of_a_gpu_are_summed_in_fp32_and_the_process_keeps_its_settings(before):
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{half}_reduced_precision_reduction" for half in ("bf16", "fp16")]

    def settings():
        return [getattr(matmul, name + part) for name in names for part in ("", "_split_k")]

    try:
        for name in names:
            setattr(matmul, name, before)
        given = settings()
        with sums_in_fp32(torch.device("cpu")):
            assert settings() == given
        with suppress(KeyError), sums_in_fp32(torch.device("cuda")):
            assert settings()[::2] == [False, False]
            raise KeyError
        assert settings() == given
    finally:
        for name in names:
            setattr(matmul, name, True)
