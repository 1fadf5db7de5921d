import pytest
import torch

from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import TOKENS_PER_ROW, Engine, head_logits, layer_shapes
from fastp3o.rollouts.engine_sampler import decodable_shapes
from fastp3o_kernels import Head
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o.models.model_families import FAMILIES, VOCABULARY, adapted, random_model
from tests.fastp3o.on_meta import META, on_meta_alone

K, RESPONSE_TOKENS = 3, 14
END_IDS = {2, 5, 11}
# One token, more than the window, and lengths between.
PROMPTS = [
    torch.randint(
        12, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()
    for length in (1, 7, 3, 12, 2, 9)
]
LONGEST = max(map(len, PROMPTS)) - 1
KEYS = response_keys(3, torch.arange(len(PROMPTS)), K)


def make_engine(
    policy: PackedModel, *, slots=18, room_beyond=0, tokens_per_row=TOKENS_PER_ROW, **options
) -> Engine:
    room = Room(len(PROMPTS) + room_beyond, LONGEST + room_beyond, K, slots, RESPONSE_TOKENS)
    options = {"graph": False} | options
    engine = Engine(policy, layer_shapes(policy, 3), room, END_IDS, **options)
    engine.tokens_per_row = tokens_per_row
    return engine


def sample(policy: PackedModel, seed: int = 3, **options):
    return make_engine(policy, **options).run(
        PROMPTS, response_keys(seed, torch.arange(len(PROMPTS)), K)
    )


def largest_difference(policy: PackedModel, ids, logprobs) -> float:
    """Largest distance of the log-probabilities from those in a packed row."""
    (row,) = pack(PROMPTS, ids, Packing(10_000))
    with torch.no_grad():
        expected = labeled_logprobs(policy, row.to(policy.model.device)).cpu()
    got = torch.tensor(
        [logprob for g in row.groups for response in logprobs[g] for logprob in response]
    )
    return (got - expected).abs().max().item()


def test_rows_of_logits_begin_where_a_gpu_loads_16_bytes_at_once():
    hidden, weight = torch.randn(3, 8), torch.randn(21, 8)
    logits = head_logits(hidden, Head(weight))
    assert logits.stride() == (32, 1)
    torch.testing.assert_close(logits, hidden @ weight.T)


@pytest.mark.parametrize("family", [*FAMILIES, "LoRA"])
def test_responses_have_the_log_probabilities_of_packed_rows_whatever_the_slots(family):
    policy = adapted("llama") if family == "LoRA" else PackedModel(random_model(family))
    ids, logprobs = sample(policy)
    assert largest_difference(policy, ids, logprobs) < 2e-5
    responses = [response for group in ids for response in group]
    assert len({len(response) for response in responses}) > 1
    for response in responses:
        assert not END_IDS & set(response[:-1])
        assert len(response) == RESPONSE_TOKENS or response[-1] in END_IDS
    beyond = {"static": True, "slots": 4, "tokens_per_row": 16, "room_beyond": 2}
    for options in ({"slots": 5}, {"slots": 1}, {"static": True}, beyond):
        again, logprobs = sample(policy, **options)
        assert again == ids, options
        assert largest_difference(policy, ids, logprobs) < 2e-5
    assert sample(policy, seed=4)[0] != ids
    assert decodable_shapes(policy) == layer_shapes(policy, 3)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_in_a_step_waits_for_the_device(family, monkeypatch):
    policy = PackedModel(random_model(family)).to(META)
    shapes = layer_shapes(PackedModel(random_model(family)), 3)
    engine = Engine(policy, shapes, Room(6, LONGEST, K, 5, RESPONSE_TOKENS), END_IDS)
    assert engine.static
    engine.queue.fill(PROMPTS, response_keys(0, torch.arange(6), K))
    with on_meta_alone(monkeypatch):
        engine.step()
        engine.step()


def test_one_engine_serves_batches_smaller_than_its_room_and_follows_the_weights():
    policy = PackedModel(random_model("llama"))
    engine = make_engine(policy, slots=5, static=True)
    expected, _ = engine.run(PROMPTS, KEYS)
    addresses = [tensor.data_ptr() for tensor in engine.tensors()]
    assert engine.run(PROMPTS[2:4], KEYS[2:4])[0] == expected[2:4]
    assert [tensor.data_ptr() for tensor in engine.tensors()] == addresses
    engine.release_memory()
    assert engine.cache.memory.untyped_storage().nbytes() == 0
    assert engine.run(PROMPTS, KEYS)[0] == expected
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.1)
    ids, logprobs = engine.run(PROMPTS, KEYS)
    assert ids != expected
    assert largest_difference(policy, ids, logprobs) < 2e-5


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_captured_steps_give_the_responses_of_others_and_follow_the_weights_in_place_and_moved(
    family, device
):
    """A step that waits for the device has no graph."""
    policy = PackedModel(random_model(family)).to(device)
    engine = make_engine(policy, graph=True)
    for scale in (1.0, 1.1):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(scale)
        ids, logprobs = engine.run(PROMPTS, KEYS)
        captured = engine.graph.graph
        assert captured is not None
        assert ids == sample(policy)[0]
        assert largest_difference(policy, ids, logprobs) < 1e-4
        # The memory comes back, and one graph serves again.
        engine.release_memory()
        assert engine.run(PROMPTS, KEYS)[0] == ids
    for parameter in policy.parameters():
        parameter.data = parameter.data.clone()
    assert engine.run(PROMPTS, KEYS)[0] == ids
    assert engine.graph.graph is not captured
