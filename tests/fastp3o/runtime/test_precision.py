"""Tests the meaning of the names of --precision, and of auto with a GPU and without."""

import pytest
import torch

from fastp3o.config import PRECISIONS
from fastp3o.runtime.precision import choose_precision, wider_precision

DTYPES = {
    "fp32": (torch.float32, None),
    "bf16-autocast": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
}


@pytest.mark.parametrize("gpu", ["none", "emulates bf16", "has bf16"])
def test_a_name_has_its_dtypes_and_auto_is_what_the_device_can_do(
    gpu: str, monkeypatch: pytest.MonkeyPatch
):
    """On a processor each half-precision dtype needs instructions of its own, or fp32 is faster."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu != "none")
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation: including_emulation or gpu == "has bf16",
    )
    assert set(DTYPES) == set(PRECISIONS) - {"auto"}
    for name, dtypes in DTYPES.items():
        precision = choose_precision(name, automatic="fp16")
        assert precision == (name, *dtypes, False)
        for instructions, slow in (
            ({}, "bf16 fp16"),
            ({"avx512_bf16": True}, "fp16"),
            ({"avx512_fp16": True}, "bf16"),
        ):
            monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=instructions: found)
            assert precision.slow_on_cpu == (name[:4] in slow.split())
    for automatic in ("fp16", "bf16-autocast"):
        expected = {"none": "fp32", "emulates bf16": "fp16", "has bf16": automatic}[gpu]
        chosen = choose_precision("auto", automatic)
        assert (chosen.name, chosen.automatic) == (expected, True)
    bf16 = {"none": True, "emulates bf16": False, "has bf16": True}[gpu]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    for trains, half in ((True, "bf16-autocast"), (False, "bf16")):
        assert wider_precision(trains=trains).name == (half if bf16 else "fp32")
