"""Makes the Triton kernels run in the interpreter where there is no GPU, and skips tests marked
`gpu` there.
"""

import gc
import os
import sys
from importlib.util import find_spec

import pytest
import torch
from hypothesis import settings

# Triton reads the variable when it is first imported, and transformers imports triton.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from tests.interpreter import mask_by_truths, quicken, round_to_nearest

        quicken()
        mask_by_truths()
        round_to_nearest()

# A busy machine takes longer than hypothesis's fifth of a second for an example that is fine.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """What was imported stays: the collector looks at it no more, and forks share its pages. The
    server of programs in several processes is forked before any test.
    """
    gc.collect()
    gc.freeze()
    if "tests.fastp3o.together" in sys.modules:
        sys.modules["tests.fastp3o.together"].server()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
