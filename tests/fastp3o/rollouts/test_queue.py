"""The queue of responses: which tokens end one."""

import pytest
import torch

from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.queue import Queue

VOCABULARY = 50


@pytest.mark.parametrize(
    "ends",
    [set(), {-1}, {-2}, {-1, 4}, {0}, {VOCABULARY - 1}, {3, 7, 2_000}, {*range(0, VOCABULARY, 2)}],
    ids=lambda ends: f"{len(ends)} ends from {min(ends, default=None)}",
)
def test_a_response_ends_with_the_ends_alone(ends):
    room = Room(VOCABULARY, 2, 1, VOCABULARY, 4)
    queue = Queue(room, ends, torch.device("cpu"))
    queue.fill([[1, 2]] * VOCABULARY, torch.zeros(VOCABULARY, 1, dtype=torch.int64))
    queue.take(torch.arange(VOCABULARY), torch.zeros(VOCABULARY))
    assert (~queue.working()).nonzero().flatten().tolist() == sorted(ends & {*range(VOCABULARY)})
