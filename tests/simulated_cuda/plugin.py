"""pytest -p tests.simulated_cuda.plugin: tests run on the pretended device, those marked `gpu`
among them.
"""

from collections.abc import Iterator

import pytest

from tests.simulated_cuda import cuda

cuda.install()


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    yield
    cuda.restart()
