"""Tests the meaning of the names of --precision, and of auto with a GPU and without."""

import pytest
import torch

from fastp3o.config import PRECISIONS
from fastp3o.precision import choose_precision

DTYPES = {
    "fp32": (torch.float32, None),
    "bf16-autocast": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, None),
    "fp16": (torch.float16, None),
}


@pytest.fixture(params=[False, True], ids=["no GPU", "GPU"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: request.param)
    return request.param


def test_every_name_but_auto_has_its_dtypes(gpu: bool):
    assert set(DTYPES) == set(PRECISIONS) - {"auto"}
    for name, dtypes in DTYPES.items():
        assert choose_precision(name, automatic="fp16") == (name, *dtypes)


@pytest.mark.parametrize("automatic", ["fp16", "bf16-autocast"])
def test_auto_is_the_stages_choice_on_a_gpu_and_fp32_without(gpu: bool, automatic: str):
    assert choose_precision("auto", automatic).name == (automatic if gpu else "fp32")


def test_auto_is_fp16_on_a_gpu_that_emulates_bf16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    for automatic in ("bf16-autocast", "fp16"):
        assert choose_precision("auto", automatic).name == "fp16"
    assert choose_precision("bf16", "fp16").name == "bf16"
