"""Responses from the engine, whatever the batch, the memory and the process; and policies that it
cannot decode.
"""

from itertools import product

import pytest
import torch

from fastp3o.errors import UserError
from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts import bundled_cache, engine_sampler
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import Engine
from fastp3o.rollouts.engine_sampler import EngineSampler
from tests.fastp3o.groups import response_ids, tokenized
from tests.fastp3o.models.model_families import random_model

P, K, RESPONSE_TOKENS = 24, 2, 24
NUMBERS = range(P)


@pytest.fixture(scope="module")
def prompts(tokenizer) -> list[str]:
    words = torch.randint(97, 123, (P, 60), generator=torch.Generator().manual_seed(0))
    return ["".join(map(chr, word[: 1 + 5 * p % 60])) for p, word in enumerate(words)]


@pytest.fixture
def policy(tokenizer) -> PackedModel:
    return peaked(tokenizer)


def peaked(tokenizer, **settings) -> PackedModel:
    """A policy with a peaked distribution, in which a tenth of the tokens end a response."""
    model = random_model(
        "llama", vocab_size=len(tokenizer), max_position_embeddings=128, **settings
    )
    model.generation_config.eos_token_id = list(range(26))
    return PackedModel(model)


def sample(
    policy, tokenizer, prompts, numbers=NUMBERS, seed=5, **options
) -> dict[tuple[int, int], list[int]]:
    """Token ids by prompt and response."""
    sampler = EngineSampler(
        policy, tokenizer, max_response_tokens=RESPONSE_TOKENS, **({"batch_size": P} | options)
    )
    groups = sampler(tokenized(tokenizer, [prompts[n] for n in numbers], numbers), K, seed)
    for group in groups:
        texts = tokenizer.batch_decode(
            [response.ids for response in group.responses], skip_special_tokens=True
        )
        assert [response.text for response in group.responses] == texts
        assert all(sum(response.logprobs) < 0 for response in group.responses)
    return {
        (n, k): group.responses[k].ids
        for n, group in zip(numbers, groups, strict=True)
        for k in range(K)
    }


@pytest.fixture
def rooms(monkeypatch) -> list[Room]:
    """The rooms of the engines that were made. These are as on a GPU: slots that stay."""
    made = []

    def static(policy, shapes, room, *rest, **options):
        if room is not engine_sampler.TRIAL_ROOM:
            made.append(room)
        return Engine(policy, shapes, room, *rest, static=True, **options)

    monkeypatch.setattr(engine_sampler, "Engine", static)
    return made


@pytest.mark.parametrize(("dtype", "full"), [(torch.float32, True), (torch.bfloat16, False)])
def test_responses_depend_on_seed_prompt_and_its_number_alone(
    policy, tokenizer, prompts, dtype, full, request
):
    policy = policy.to(dtype)
    expected = sample(policy, tokenizer, prompts)
    assert len({len(ids) for ids in expected.values()}) > 5
    assert sample(policy, tokenizer, prompts, seed=6) != expected
    assert sample(policy, tokenizer, prompts, batch_size=7) == expected
    # With less memory, prompts share a cache with others of another longest one. In half precision
    # its products round otherwise on a CPU, and now and then another token is drawn.
    narrower = sample(policy, tokenizer, prompts, memory=20_000)
    others = sum(ids != expected[number] for number, ids in narrower.items())
    assert others <= (0 if full else len(expected) // 8)
    two_processes = [
        sample(policy, tokenizer, prompts, NUMBERS[process::2]) for process in range(2)
    ]
    assert two_processes[0] | two_processes[1] == expected
    assert sample(policy, tokenizer, prompts, NUMBERS[::-1]) == expected
    # Whatever prompts are as long.
    if full:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(bundled_cache, "PRODUCTS_OF_A_CALL", 0)
            assert sample(policy, tokenizer, prompts) == expected
    # As on a GPU, also with rows of prompts of equal length. In half precision attention rounds
    # otherwise there.
    request.getfixturevalue("rooms")
    expected = expected if full else sample(policy, tokenizer, prompts)
    limits = ({}, {"batch_size": 5}, {"memory": 20_000})
    for tokens_per_row, options in (
        product((64, 2048), limits) if full else ((64, limits[1]), (2048, limits[2]))
    ):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Engine, "tokens_per_row", tokens_per_row)
            assert sample(policy, tokenizer, prompts, **options) == expected


def test_responses_to_a_prompt_are_independent_from_their_first_token_on(policy, tokenizer):
    """As many pairs begin alike as two samples of the distribution would."""
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=1, batch_size=2000)
    groups = sampler(tokenized(tokenizer, ["same"] * 1500), 2, 0)
    first = torch.tensor(response_ids(groups))[:, :, 0]
    logprobs = torch.tensor(
        [[sum(response.logprobs) for response in group.responses] for group in groups]
    )
    by_chance = logprobs.exp().mean().item()  # Σ p², as tokens come with probability p
    equal = (first[:, 0] == first[:, 1]).double().mean().item()
    assert abs(equal - by_chance) < 5 * (by_chance / 1500) ** 0.5


def test_memory_limits_the_prompts_and_is_given_back_to_the_device(
    policy, tokenizer, prompts, rooms, monkeypatch
):
    """While torch keeps it, an optimizer's moments go into it, and the next cache has no room."""
    bytes_per_token = 2 * 2 * 16 * 4  # layers, keys and values of one head of 16
    memory = 5 * bytes_per_token * (55 + K * RESPONSE_TOKENS)
    sampler = EngineSampler(
        policy, tokenizer, max_response_tokens=RESPONSE_TOKENS, batch_size=P, memory=memory
    )
    held = []

    def returned(device):
        held.append(sampler.engine.cache.memory.untyped_storage().nbytes())

    monkeypatch.setattr(engine_sampler, "return_unused_memory", returned)
    given = tokenized(tokenizer, prompts)
    for _ in range(2):
        sampler(given, K, 0)
    # One engine for all batches and calls.
    assert [(room.prompts, room.slots) for room in rooms] == [(5, 10)]
    assert held == [0, 0]


def test_an_engine_that_has_become_too_large_gives_way(
    policy, tokenizer, prompts, rooms, monkeypatch
):
    """Its room was that of the first call; by the third an optimizer has taken most of it."""
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=RESPONSE_TOKENS, batch_size=P)
    given = tokenized(tokenizer, prompts)
    for free, count in ((10**9, P), (10**9, P), (10**5, 2)):
        monkeypatch.setattr(engine_sampler, "available_memory", lambda device, free=free: free)
        sampler(given[:count], K, 0)
    assert [room.prompts for room in rooms] == [P, 2]
    assert rooms[1].tokens * sampler.bytes_per_token() <= 10**5


def test_training_mode_and_checkpointing_come_back(policy, tokenizer, prompts):
    expected = sample(policy, tokenizer, prompts)
    checkpointed = peaked(tokenizer)
    checkpointed.recompute_activations()
    checkpointed.train()
    assert sample(checkpointed, tokenizer, prompts) == expected
    assert all(module.training for module in checkpointed.modules())


def loses_the_cache(model):
    """Hands its positions on, but not what decoding needs."""
    forward = model.base_model.forward
    model.base_model.forward = lambda *args, fastp3o_cache=None, **kwargs: forward(*args, **kwargs)


def forgets_its_keys(model):
    layer = model.base_model.layers[0].self_attn
    forward = layer.forward

    def forgets_old_keys(*args, **kwargs):
        if "fastp3o_cache" in kwargs and "fastp3o_segments" not in kwargs:
            for tensor in kwargs["fastp3o_cache"].tensors():
                tensor.zero_()
        return forward(*args, **kwargs)

    layer.forward = forgets_old_keys


@pytest.mark.parametrize(
    ("break_model", "said"),
    [
        (loses_the_cache, "--sampler transformers can, more slowly: a trial failed with"),
        (forgets_its_keys, "its tokens have other log-probabilities than in a packed row"),
    ],
)
def test_what_the_engine_cannot_decode_is_refused_with_the_sampler_that_can(
    policy, tokenizer, break_model, said
):
    break_model(policy.model)
    with pytest.raises(UserError, match=f"cannot decode LlamaForCausalLM; .*{said}"):
        sample(policy, tokenizer, ["same"] * P)


def test_rotary_positions_that_look_at_values_are_no_obstacle(tokenizer, prompts):
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    assert sample(peaked(tokenizer, rope_parameters=rope), tokenizer, prompts)
