"""Fixtures of the kernels' tests."""

import pytest


@pytest.fixture(params=["eager", "triton"])
def impl(request: pytest.FixtureRequest) -> str:
    return request.param
