"""The memory checker sees every kernel."""

import re
from pathlib import Path

import pytest
import torch

import fastp3o_kernels
from benchmarks import small_case
from tests.kernels.interpreted import counted_launches
from tests.kernels.problems import as_on_a_gpu

PACKAGE = Path(fastp3o_kernels.__file__).parent


def launched_kernels() -> set[str]:
    """The names of kernels that the package launches with a grid."""
    sources = [path.read_text() for path in PACKAGE.glob("**/*_kernel.py")]
    kernels = {name for source in sources for name in re.findall(r"@triton\.jit.*?\ndef (\w+)\(", source, re.DOTALL)}
    return kernels & {name for source in sources for name in re.findall(r"(\w+)\[\(", source)}


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts launches of the interpreter")
def test_small_cases_launch_every_kernel_and_agree_with_fp64(monkeypatch):
    assert len(launched_kernels()) >= 9
    # The interpreter takes its time, and settings do not change which kernels are launched.
    monkeypatch.setattr(small_case, "V", 203)
    monkeypatch.setattr(small_case, "CLIPPING", ("token",))
    with counted_launches(monkeypatch) as launches:
        for name in small_case.CASES:
            small_case.check(name, torch.device("cpu"), torch.float32)
        # Only a GPU multiplies halves as they are, and scales their gradients.
        with as_on_a_gpu(torch.float16):
            problem = small_case.make_problem(torch.device("cpu"), torch.float16)
            small_case.p3o_from_hidden(problem, "token", False, impl="triton")
    assert launched_kernels() <= launches.keys()


def test_a_result_that_is_wrong_is_found(monkeypatch):
    def wrong(device, dtype):
        yield small_case.Comparison(torch.ones(3), torch.ones(3), 1e-4)
        yield small_case.Comparison(torch.ones(3), 1.01 * torch.ones(3), 1e-4)

    monkeypatch.setitem(small_case.CASES, "wrong", wrong)
    with pytest.raises(AssertionError, match=r"wrong, torch.float32, result 1: error 9.9e-03"):
        small_case.check("wrong", torch.device("cpu"), torch.float32)
