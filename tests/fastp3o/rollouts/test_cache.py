"""Caches: as much room as memory has, all of it used; a CPU's against decode attention's oracle in
fp64.
"""

import random
from contextlib import nullcontext
from functools import partial

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.host_work import host_work
from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts import bundled_cache
from fastp3o.rollouts.cache import (
    MOST_SLOTS,
    SHARE,
    Cache,
    LayerShape,
    Room,
    available_memory,
    fitting_room,
)
from fastp3o.rollouts.engine import Engine
from tests.kernels.decoding.steps import oracle, random_step


def room(
    memory: int, *, prompts: int = 8, K: int = 2, longest: int = 10, response: int = 5
) -> Room:
    return fitting_room(longest, response, K, prompts=prompts, bytes_per_token=100, memory=memory)


def test_all_at_once_where_memory_suffices_then_fewer_prompts_then_fewer_slots_then_one():
    assert room(10**9, longest=0) == Room(8, 1, 2, 16, 5)
    assert room(10**9, prompts=1000).slots == MOST_SLOTS
    assert room(8 * 20 * 100) == Room(8, 10, 2, 16, 5)
    assert room(5 * 20 * 100) == Room(5, 10, 2, 10, 5)
    assert room(15 * 100) == Room(1, 10, 2, 1, 5)
    assert room(0) == Room(1, 10, 2, 1, 5)


@given(
    st.integers(0, 10**7),
    st.integers(1, 300),
    st.integers(1, 400),
    st.integers(0, 600),
    st.integers(1, 300),
)
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


@pytest.mark.parametrize("seed", range(60))
def test_bundles_attend_as_the_oracle_also_when_they_change_places(seed, monkeypatch):
    pick = random.Random(seed)
    copies, Hkv, G, P, Lp, Lr, D = (
        *(pick.randint(1, 3) for _ in range(3)),
        *(pick.randint(1, 7) for _ in range(3)),
        16,
    )
    K = copies * pick.randint(1, 3)
    settings = {"window": pick.choice([None, 1, 4]), "softcap": pick.choice([None, 1.5])}
    shape = {
        "P": P,
        "K": K,
        "Hkv": Hkv,
        "G": G,
        "D": D,
        "Lp": Lp,
        "Lr": Lr,
        "idle": 0,
        "dtype": torch.float64,
    }
    step = random_step(**shape, left_out=pick.randrange(P * K), seed=seed, **settings)
    kv, slots, lengths = step.cache, step.slots, step.slots.cached_lengths.tolist()
    monkeypatch.setattr(bundled_cache, "prompt_copies", lambda *_: copies)
    if pick.random() < 0.5:  # a width for each length
        monkeypatch.setattr(bundled_cache, "PRODUCTS_OF_A_CALL", 0)
        monkeypatch.setattr(bundled_cache, "NEXT_WIDTH", 0.99)
    shapes = {5: LayerShape(Hkv, D, torch.float64), 6: LayerShape(1, 8, torch.float32)}
    cache = bundled_cache.BundledCache(
        shapes | {7: shapes[5]}, Room(P, Lp, K, P * K, Lr), torch.device("cpu")
    )
    cache.begin(lengths[:P])
    for p, length in enumerate(lengths[:P]):
        cache.prompt_of_token, cache.position_of_token = (
            torch.full((length,), p),
            torch.arange(length),
        )
        cache.store(
            7, *(t[p, :, :length].transpose(0, 1) for t in (kv.prompt_keys, kv.prompt_values))
        )
    for r, own in enumerate(slots.steps.tolist()):
        new = (t[r, :, :own].transpose(0, 1) for t in (kv.own_keys, kv.own_values))
        cache.store_own(7, slots.response[r].expand(own), torch.arange(own), *new)
    # What is left out keeps its keys.
    cache.keep_slots(slots.response[pick.randrange(len(slots.response)) :])
    cache.keep_slots(slots.response)
    cache.begin_step(slots, int(slots.steps.max()))
    result = cache.attend(
        7, *(t.transpose(0, 1)[None] for t in (step.query, step.key, step.value)), **step.settings
    )
    torch.testing.assert_close(result[0], oracle(step), atol=1e-9, rtol=0)


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    st.integers(1, 12),
    st.integers(1, 600),
    st.data(),
)
def test_widths_take_no_more_room_than_one_of_the_longest_prompt(lengths, K, response_tokens, data):
    spare = data.draw(st.integers(0, 3))
    sizes = Room(
        len(lengths) + spare, max(1, *lengths), K, (len(lengths) + spare) * K, response_tokens
    )
    cache = bundled_cache.BundledCache(
        {0: LayerShape(1, 1, torch.int8)}, sizes, torch.device("cpu")
    )
    cache.begin(lengths)
    assert cache.widths[-1].end <= cache.tokens()
    widths = bundled_cache.by_width(lengths, sizes)
    assert sorted(prompt for prompts in widths for prompt in prompts) == list(range(sizes.prompts))
    for prompts, width in zip(widths, cache.widths, strict=True):
        assert width.prompt_tokens == max(
            1, *(lengths[prompt] for prompt in prompts if prompt < len(lengths))
        )
        assert width.copies * width.members == K
    # A bundle's keys belong to nobody else.
    own, strides = (
        cache.first_own(torch.arange(sizes.responses)).tolist(),
        cache.members_of.tolist(),
    )
    places = [
        range(begin, begin + n * response_tokens, n)
        for begin, n in zip(own[:60], strides[:60], strict=True)
    ]
    assert len({place for one in places for place in one}) == len(places) * response_tokens


def engine_of(
    prompts: list[list[int]], K: int, response_tokens: int, end_ids: set[int] = frozenset()
) -> Engine:
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    torch.manual_seed(0)
    policy = PackedModel(
        LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, max_position_embeddings=10**5))
    ).eval()
    room = Room(len(prompts), max(map(len, prompts)) - 1, K, len(prompts) * K, response_tokens)
    return Engine(
        policy, {layer: LayerShape(4, 8, torch.float32) for layer in range(2)}, room, set(end_ids)
    )


def test_a_long_prompt_among_short_ones_costs_what_it_costs_alone(monkeypatch):
    products, attention = [], torch.nn.functional.scaled_dot_product_attention

    def counted(query, key, *rest, **options):
        products.append(len(query) * query.shape[-2] * key.shape[-2])
        return attention(query, key, *rest, **options)

    def work(lengths: list[int]) -> int:
        prompts, products[:] = [[5] * (length + 1) for length in lengths], []
        engine_of(prompts, 4, 16).run(prompts, torch.arange(4 * len(lengths)).view(-1, 4))
        return sum(products)

    monkeypatch.setattr(bundled_cache.F, "scaled_dot_product_attention", counted)
    for short, long in (([64] * 15, [2048]), ([30, 50, 64] * 10, [500, 400, 2048])):
        alone = work(short) + sum(work([length]) for length in long)
        assert work([*short[:7], *long, *short[7:]]) <= 1.15 * alone


def test_a_larger_limit_moves_no_more_keys_where_no_response_is_longer():
    """Bundles whose responses have ended give their places to others."""

    def moved(limit: int) -> int:
        prompts = [[5] * 40] * 8
        engine = engine_of(prompts, 4, limit, end_ids=set(range(16)))
        with CountedIndexing() as counted:
            ids, _ = engine.run(prompts, torch.arange(32).view(-1, 4))
        assert max(len(response) for group in ids for response in group) < 500
        return counted.elements

    assert moved(500) > 10**5
    assert moved(8000) == moved(500)


class CountedIndexing(TorchDispatchMode):
    """Counts the elements that tensors of places take from others."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.index.Tensor:
            self.elements += result.numel()
        return result


def test_the_room_for_the_longest_is_no_memory_until_it_is_used():
    before = psutil.Process().memory_info().rss
    cache = bundled_cache.BundledCache(
        {0: LayerShape(1, 64, torch.float32)}, Room(99, 9999, 1, 99, 1), torch.device("cpu")
    )
    cache.begin([5] * 99)
    assert cache.memory.numel() > 5 * 10**8
    assert cache.memory.data_ptr() % bundled_cache.ALIGNMENT == 0
    assert psutil.Process().memory_info().rss - before < 10**8


def test_operations_of_a_step():
    """Of a Llama with four layers, views counted: 284 are transformers' own (10 more in 5.17);
    `generate` has 341.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
    }
    policy = PackedModel(LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=1024))).eval()
    calls: list[object] = []
    policy.layers()[-1].mlp.register_forward_hook(lambda *_: calls.append(0))
    shapes, keys = (
        {layer: LayerShape(4, 8, torch.float32) for layer in range(4)},
        torch.arange(4).view(2, 2),
    )
    engines = (Engine(policy, shapes, Room(2, 8, 2, 4, tokens), set()) for tokens in (8, 16))
    few, many = (
        host_work(partial(engine.run, [[5] * 9, [6] * 4], keys))["operations"] for engine in engines
    )
    assert (many - few) / 8 <= 370
    assert len(calls) == 8 + 16  # the prompts' pass ends with the last layer's keys
