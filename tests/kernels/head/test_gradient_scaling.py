import pytest
import torch

from fastp3o_kernels.head import backward
from fastp3o_kernels.head.scale_kernel import BLOCK, launch_lowered_scale


@pytest.mark.parametrize("triton", [True, False])
def test_tensors_of_all_dtypes_are_scaled_in_place(triton, device):
    tensors = [
        torch.randn(size, device=device).to(dtype)
        for size, dtype in (
            (1, torch.float16),
            (100, torch.bfloat16),
            (BLOCK + 3, torch.float32),
            (0, torch.float32),
        )
    ]
    expected = [values * 0.5 for values in tensors]
    backward.scale_in_place(
        [*tensors[:2], None, *tensors[2:]], torch.tensor(0.5, device=device), triton=triton
    )
    assert all(map(torch.equal, tensors, expected))
    # A number too small for halves scales them.
    values = torch.tensor([60000.0, 3.0], device=device).half()
    backward.scale_in_place([values], torch.tensor(2.0**-30, device=device), triton=triton)
    assert values.tolist() == [pytest.approx(60000 * 2**-30, rel=1e-2), 0]


def test_another_dtype_is_reached_in_one_rounding(device):
    values, factor = torch.randn(1000, device=device), torch.tensor(0.3, device=device)
    assert torch.equal(
        backward.converted(values, factor, torch.bfloat16), (values * factor).bfloat16()
    )
    assert torch.equal(backward.converted(values, None, torch.bfloat16), values.bfloat16())
    buffer = torch.randn(3 * backward.ROWS_MOVED + 5, 48, device=device)
    expected, after = buffer[7:-7, :37].bfloat16(), buffer[-7:].clone()
    assert torch.equal(backward.rounded_in_place(buffer[7:-7, :37], torch.bfloat16), expected)
    assert torch.equal(buffer[-7:], after)


@pytest.mark.parametrize("size", [1, 7, BLOCK + 5])
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("largest", [0.0, 1e-30, 3e-5, 0.7, 1.0, 3e9])
@pytest.mark.parametrize("before", [backward.HIGHEST_SCALE, 1.0])
def test_the_scale_brings_the_largest_coefficient_to_a_thousand_and_never_rises(
    device, size, entropy, largest, before
):
    torch.manual_seed(0)
    coefficients = largest * (torch.rand(1 + entropy, size, device=device) - 0.5)
    coefficients[-1, -1] = -largest
    scale = torch.tensor(before, device=device)
    lowered, ratio, scaled = launch_lowered_scale(
        scale, coefficients, backward.LARGEST_SCALED, backward.HIGHEST_SCALE
    )
    assert lowered.log2() == lowered.log2().round()
    assert ratio * scale == lowered <= scale
    assert (
        lowered == scale
        or backward.LARGEST_SCALED / 2 <= lowered * largest < backward.LARGEST_SCALED
    )
    assert lowered < scale or largest * scale <= backward.LARGEST_SCALED
    assert torch.equal(scaled, coefficients * lowered)
    for value in (float("inf"), float("nan")):  # what is not finite stays so
        coefficients[0, 0] = value
        assert not launch_lowered_scale(
            scale, coefficients, backward.LARGEST_SCALED, backward.HIGHEST_SCALE
        )[2][0, 0].isfinite()
