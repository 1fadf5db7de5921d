"""The cache of a CPU against decode attention's oracle in fp64, and the operations of a step."""

from dataclasses import replace
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, LlamaConfig

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts import bundled_cache
from fastp3o.rollouts.bundled_cache import BundledCache
from fastp3o.rollouts.cache import LayerShape, Room
from fastp3o.rollouts.engine import STEPS_OF_NUMBERS, Engine, layer_shapes
from fastp3o_kernels.decoding import response_keys
from tests.kernels.decoding.steps import oracle, random_step

# Dispatched operations of a step of a Llama with four layers, views counted: 284 are transformers' own.
OPERATIONS = 360


@settings(max_examples=60, deadline=None)
@given(
    P=st.integers(1, 4),
    M=st.integers(1, 3),
    copies=st.integers(1, 3),
    Hkv=st.integers(1, 3),
    G=st.integers(1, 3),
    Lp=st.integers(1, 9),
    Lr=st.integers(1, 7),
    window=st.sampled_from([None, 1, 4]),
    softcap=st.sampled_from([None, 1.5]),
    left_out=st.integers(0, 7),
    seed=st.integers(0, 10**6),
)
def test_bundles_attend_as_the_oracle_also_when_places_change(
    P, M, copies, Hkv, G, Lp, Lr, window, softcap, left_out, seed
):
    K, D = M * copies, 16
    shape = {"P": P, "K": K, "Hkv": Hkv, "G": G, "D": D, "Lp": Lp, "Lr": Lr, "idle": 0, "seed": seed}
    step = random_step(**shape, left_out=min(left_out, P * K - 1), window=window, softcap=softcap, dtype=torch.float64)
    kv, slots, lengths = step.cache, step.slots, step.slots.cached_lengths[:-1]
    shapes = {layer: LayerShape(Hkv, D, torch.float64) for layer in (5, 7)}
    shapes[6] = LayerShape(1, 8, torch.float32)
    with patch.object(bundled_cache, "prompt_copies", lambda *_: copies):
        cache = BundledCache(shapes, Room(P, Lp, K, P * K, Lr), torch.device("cpu"))
    cache.begin(lengths.tolist())
    for p, length in enumerate(lengths.tolist()):
        cache.prompt_of_token, cache.position_of_token = torch.full((length,), p), torch.arange(length)
        cache.store(7, *(t[p, :, :length].transpose(0, 1) for t in (kv.prompt_keys, kv.prompt_values)))
    for r, (response, own) in enumerate(zip(slots.response, slots.steps.tolist(), strict=True)):
        new = (t[r, :, :own].transpose(0, 1) for t in (kv.own_keys, kv.own_values))
        cache.store_own(7, response.expand(own), torch.arange(own), *new)
    # Bundles change places twice; those that are left out keep their keys.
    cache.keep_slots(slots.response[seed % len(slots.response) :])
    cache.keep_slots(slots.response)
    cache.begin_step(replace(slots, masks={}), int(slots.steps.max()))
    expected = oracle(step)
    tensors = (t.transpose(0, 1)[None] for t in (step.query, step.key, step.value))
    result = cache.attend(7, *tensors, **{"window": None, "softcap": None} | step.settings)
    torch.testing.assert_close(result[0], expected, atol=1e-9, rtol=0)
    for r, (response, own) in enumerate(zip(slots.response.tolist(), slots.steps.tolist(), strict=True)):
        p = response // K
        for (prompt, mine), shared, stored, new in zip(
            cache.cached(7, p, int(lengths[p]), response, own + 1),
            (kv.prompt_keys, kv.prompt_values),
            (kv.own_keys, kv.own_values),
            (step.key, step.value),
            strict=True,
        ):
            assert torch.equal(prompt, shared[p, :, : lengths[p]])
            assert torch.equal(mine, torch.cat([stored[r, :, :own], new[r][:, None]], dim=1))


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@torch.no_grad()
def test_operations_of_a_step():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    policy = PackedModel(AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=1024))).eval()
    engine = Engine(policy, layer_shapes(policy, 3), Room(2, 8, 2, 4, 2 * STEPS_OF_NUMBERS), {2000})
    engine.queue.fill([[5] * 9, [6] * 4], response_keys(0, torch.arange(2), 2))
    engine.prefill([[5] * 9, [6] * 4])
    engine.step()
    engine.numbers = []
    with Operations() as operations:
        for _ in range(STEPS_OF_NUMBERS):
            engine.step()
            assert engine.drop_idle_slots()
    assert operations.count <= OPERATIONS * STEPS_OF_NUMBERS
