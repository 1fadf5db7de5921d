"""Records results (`recording.py`), orders benchmarks by worth, and takes what stops a peer for a
result.
"""

from traceback import clear_frames

import pytest
import torch

from benchmarks.layer_ways import LAYERS
from benchmarks.measure import release
from benchmarks.peers import AbsentError
from benchmarks.shapes import DTYPES, TOKENS, typed
from benchmarks.training_shapes import LENGTHS, RESPONSES

pytest_plugins = ["benchmarks.recording"]


def pytest_make_parametrize_id(val: object) -> str | None:
    return typed(val) if isinstance(val, str | tuple) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=order)


def order(item: pytest.Item) -> tuple[bool | int, ...]:
    """A run that ends early has measured what the goals are about, and every peer at the first
    number of tokens.

    Then come the level of updates, rollouts and iterations, with every layout, way of layers and
    peer at TL;DR's lengths and K 2 first, the other numbers of tokens, more of the peers, other
    objectives, and what only explains. What compiles for long comes last of its kind.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    tokens = TOKENS.index(parameters.get("tokens", TOKENS[0]))
    dtype = DTYPES.index(parameters.get("dtype", DTYPES[0]))
    explains, peers = "without_gradients" in item.name, "of_peers" in item.name
    whole = any(word in item.name for word in ("rollouts", "iteration"))
    slow = any(
        word in item.name
        for word in ("compile", "static", "QuACK", "Liger_scaled", "Liger_cross-entropy")
    )
    more_peers = peers and tokens > 0
    later = whole and "policy-350-40-None-2" not in item.name
    lengths, K = (
        parameters.get(name, first)
        for name, first in (("lengths", LENGTHS[0]), ("K", RESPONSES[0]))
    )
    further = LENGTHS.index(lengths) > 0, RESPONSES.index(K) > 0
    layers = [*LAYERS].index(parameters.get("layers", "fastp3o"))
    order = explains, "objective" in item.name, more_peers, tokens, whole, *further
    return *order, layers, later, slow, "budget" in item.name, peers, dtype


@pytest.fixture(autouse=True)
def with_free_memory():
    yield
    release()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item):
    """A peer that is absent, or does not fit into memory, is a result."""
    try:
        return (yield)
    except (ImportError, AbsentError) as error:
        reason = f"absent: {error}"
    except torch.OutOfMemoryError as error:
        # Its frames would keep their tensors while the next benchmark runs.
        clear_frames(error.__traceback__)
        reason = "out of memory"
    except Exception as error:
        if "fastp3o" in item.name:
            raise
        clear_frames(error.__traceback__)
        reason = f"failed: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    pytest.skip(reason)
