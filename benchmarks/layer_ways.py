"""The ways in which the layers of one policy compute: as in every run, as transformers wrote them,
and compiled.
"""

from collections.abc import Callable
from unittest.mock import patch

from benchmarks.measure import one_at_a_time
from benchmarks.peers import AbsentError
from benchmarks.shapes import CUDA, TRIAL
from benchmarks.test_packing import random_policy
from fastp3o.models import packed_model
from fastp3o.models.packed_model import PackedModel


def plain() -> PackedModel:
    if not CUDA:
        raise AbsentError("a CPU runs the layers as transformers wrote them")
    with patch.object(packed_model, "fuse", lambda *_: None):
        return random_policy()


def compiled() -> PackedModel:
    if TRIAL or not CUDA:
        raise AbsentError("layers are compiled for a GPU")
    policy = random_policy()
    policy.compile_layers()
    return policy


# All are fastp3o's: where one fails, the suite does.
LAYERS: dict[str, Callable[[], PackedModel]] = {
    "fastp3o": random_policy,
    "fastp3o plain layers": plain,
    "fastp3o compiled layers": compiled,
}


@one_at_a_time
def policy_with(layers: str) -> PackedModel:
    """One policy at a time in memory. Raises AbsentError where there is no such way."""
    return LAYERS[layers]()
