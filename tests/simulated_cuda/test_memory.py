"""The memory that the calculator predicts, on the pretended device."""

import pytest

from tests.simulated_cuda.test_simulated_cuda import CASES, pytestmark, run  # noqa: F401


@pytest.mark.simulated
def test_predictions():
    run(f"{CASES}/memory.py")
