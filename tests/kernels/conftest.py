"""Fixtures of the kernels' tests."""

from collections.abc import Callable

import pytest
import torch

from fastp3o_kernels.head import backward, forward
from fastp3o_kernels.head.dtypes import HeadDtypes
from tests.kernels.problems import DEVICE


@pytest.fixture(params=["eager", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def multiply_fp16(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on the head multiplies fp16 on a CPU as a GPU does: fp32 sums, gradients of logits in fp16. On a
    GPU it has nothing to do.
    """

    def multiplied(a, b, out, *, accumulate=False):
        product = a.float() @ b.float()
        out.copy_(out + product if accumulate else product)

    def begin() -> None:
        if DEVICE.type != "cpu":
            return
        for module in (forward, backward):
            monkeypatch.setattr(module, "multiply", multiplied)
        dtypes = HeadDtypes(torch.float16, torch.float16, torch.float32)
        monkeypatch.setattr(HeadDtypes, "for_hidden", lambda hidden: dtypes)

    return begin
