"""The cache: as much room as memory has, all of it used, and what is left free."""

from contextlib import nullcontext

import torch
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.rollouts.cache import MOST_SLOTS, SHARE, Cache, LayerShape, Room, available_memory, fitting_room


def room(memory: int, *, prompts: int = 8, K: int = 2, longest: int = 10, response: int = 5) -> Room:
    return fitting_room(longest, response, K, prompts=prompts, bytes_per_token=100, memory=memory)


def test_all_at_once_where_memory_suffices_then_fewer_prompts_then_fewer_slots_then_one():
    assert room(10**9, longest=0) == Room(8, 1, 2, 16, 5)
    assert room(10**9, prompts=1000).slots == MOST_SLOTS
    assert room(8 * 20 * 100) == Room(8, 10, 2, 16, 5)
    assert room(5 * 20 * 100) == Room(5, 10, 2, 10, 5)
    assert room(15 * 100) == Room(1, 10, 2, 1, 5)
    assert room(0) == Room(1, 10, 2, 1, 5)


@given(st.integers(0, 10**7), st.integers(1, 300), st.integers(1, 400), st.integers(0, 600), st.integers(1, 300))
def test_never_more_than_the_memory_holds_but_one_slot(memory, prompts, K, longest, response):
    found = room(memory, prompts=prompts, K=K, longest=longest, response=response)
    assert 1 <= found.prompts <= prompts
    assert 1 <= found.slots <= min(MOST_SLOTS, found.responses)
    assert found.tokens * 100 <= memory or found[0] == found.slots == 1


def test_the_cache_takes_what_the_room_says():
    shapes = {0: LayerShape(2, 8, torch.float32), 3: LayerShape(1, 16, torch.bfloat16)}
    sizes = Room(3, 7, 2, 4, 5)
    cache = Cache(shapes, sizes, torch.device("cpu"))
    expected = sizes.tokens * sum(shape.bytes_per_token for shape in shapes.values())
    assert cache.memory.untyped_storage().nbytes() == expected
    assert sum(tensor.numel() * tensor.element_size() for tensor in cache.tensors()) == expected
    assert cache.layers[3].own_values.shape == (4, 1, 5, 16)
    for tensor in (tensor for layer in cache.layers.values() for tensor in vars(layer).values()):
        assert tensor.untyped_storage().data_ptr() == cache.memory.untyped_storage().data_ptr()


def test_a_part_of_what_is_free_is_available_and_fragments_beside_tensors_are_not_free(monkeypatch):
    """Of 100 GB torch holds 40 in tensors, 30 in whole blocks and 20 in what is left of split ones."""
    kept = {"whole": 30, "fragments": 20}
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: 1 / 0)
    assert available_memory(torch.device("cpu")) > 0
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: kept.update(whole=0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (60 - sum(kept.values()), 100))
    assert available_memory(torch.device("cuda")) == int(SHARE * 40)
