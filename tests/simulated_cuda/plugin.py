"""pytest -p tests.simulated_cuda.plugin: tests run on the pretended device, those marked `gpu` among them."""

from collections.abc import Iterator

import pytest

from tests.simulated_cuda import cuda

cuda.install()

# Tests that the device cannot run, by a part of their names.
CANNOT = {"test_compiled_models": "the pretended device is a mode of torch's dispatch, under which nothing is compiled"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name, reason in CANNOT.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    yield
    cuda.restart()
