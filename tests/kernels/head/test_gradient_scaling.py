import pytest
import torch

from fastp3o_kernels.head.backward import scaled
from fastp3o_kernels.head.scale_kernel import BLOCK
from fastp3o_kernels.operation import INTERPRET
from tests.kernels.interpreted import counted_traffic


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("triton", [True, False])
@pytest.mark.parametrize("size", [1, 100, BLOCK + 3])
def test_scales_in_place(dtype, triton, size, device):
    values = torch.randn(size, device=device).to(dtype)
    expected = values * 0.5
    result = scaled(values, torch.tensor(0.5, device=device), dtype, triton=triton)
    assert result.data_ptr() == values.data_ptr()
    assert torch.equal(result, expected)


@pytest.mark.parametrize("triton", [True, False])
def test_a_number_too_small_for_halves_scales_them(triton, device):
    values = torch.tensor([60000.0, 3.0], device=device).half()
    result = scaled(values, torch.tensor(2.0**-30, device=device), torch.float16, triton=triton)
    assert result.tolist() == [pytest.approx(60000 * 2**-30, rel=1e-2), 0]


def test_another_dtype_is_reached_in_one_rounding(device):
    values = torch.randn(1000, device=device)
    result = scaled(values, torch.tensor(0.3, device=device), torch.bfloat16, triton=True)
    assert torch.equal(result, (values * torch.tensor(0.3, device=device)).bfloat16())


@pytest.mark.skipif(not INTERPRET, reason="bytes are counted in the interpreter")
@pytest.mark.parametrize(("factor", "passes"), [(1.0, 0), (2.0, 1)])
def test_a_factor_of_one_moves_no_bytes(monkeypatch, factor, passes):
    values = torch.randn(4 * BLOCK)
    with counted_traffic(monkeypatch) as traffic:
        scaled(values, torch.tensor(factor), torch.float32, triton=True)
    scale = 4 * 4
    assert (traffic.loaded, traffic.stored) == (scale + passes * 16 * BLOCK, passes * 16 * BLOCK)
