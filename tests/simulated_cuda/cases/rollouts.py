"""The engine on the pretended device: where the host waits, what a step launches, and graphs."""

import gc
from itertools import chain, pairwise
from unittest.mock import MagicMock

import pytest
import torch

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import STEPS_PER_LOOK, Engine, layer_shapes
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Prompt, SamplingSettings
from fastp3o.rollouts.steps import StepGraph, logger
from fastp3o.rollouts.turns.kept import KeptEngine
from fastp3o_kernels.decoding import response_keys, sample_tokens
from tests.fastp3o.models.model_families import random_model
from tests.simulated_cuda.host import recorded

PROMPTS, K, RESPONSE_TOKENS = [[3, 4, 5], [6, 7]], 2, 12
KEYS = response_keys(0, torch.arange(2), K)
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
# Launches of a step without its layers, and of a layer.
STEP, LAYER = 19, 11
LOOK, RESULTS = (
    ("fastp3o/rollouts/engine.py", "Engine.decode"),
    ("fastp3o/rollouts/queue.py", "Queue.results"),
)


def make_policy(*, layers: int = 1, **changes) -> PackedModel:
    return PackedModel(random_model("llama", num_hidden_layers=layers, **changes)).to("cuda")


@torch.no_grad()
def make_engine(
    policy: PackedModel, *, graph: bool, top_p: float = 1.0, ends: frozenset[int] = frozenset({0})
) -> Engine:
    # Fewer slots than responses: they take others.
    room, settings = Room(2, 4, K, 3, RESPONSE_TOKENS), SamplingSettings(top_p=top_p)
    return Engine(policy, layer_shapes(policy, 3), room, set(ends), settings, graph=graph)


@pytest.mark.parametrize(("top_p", "kernel"), [(1.0, "race_kernel"), (0.9, "top_p_kernel")])
def test_the_host_looks_every_few_steps_and_reads_the_results_once(top_p, kernel):
    policy = make_policy()
    engine = make_engine(policy, graph=False, top_p=top_p)
    with recorded() as plain:
        ids, _ = engine.run(PROMPTS, KEYS)
    steps = plain.launches[f"triton {kernel}"]
    assert plain.places() == {LOOK: steps // STEPS_PER_LOOK, RESULTS: 1}
    captured = make_engine(policy, graph=True, top_p=top_p)
    assert captured.run(PROMPTS, KEYS)[0] == ids
    with recorded() as replayed:
        assert captured.run(PROMPTS, KEYS)[0] == ids
    assert replayed.launches["graph"] == steps
    assert replayed.places() == plain.places()


def test_a_graph_serves_whatever_the_number_of_ends():
    """A stop string has thousands, of a vocabulary that is larger than the head's rows or smaller."""
    policy, few, many = make_policy(), frozenset({0}), frozenset({0, *range(1_000, 3_000)})
    expected, _ = make_engine(policy, graph=False, ends=few).run(PROMPTS, KEYS)
    engine = make_engine(policy, graph=True, ends=many)
    assert engine.run(PROMPTS, KEYS)[0] == expected
    with recorded() as record:
        assert engine.run(PROMPTS, KEYS)[0] == expected
    assert record.launches["graph"]
    assert set(record.places()) == {LOOK, RESULTS}


def test_turns_with_kept_keys_replay_the_graph_and_wait_no_more():
    policy = make_policy()
    found, room = [], Room(2, 4, K, 2 * K, 40)
    for graph in (False, True):
        engine = KeptEngine(6, policy, layer_shapes(policy, 3), room, {0}, graph=graph)
        ids, _ = engine.run(PROMPTS, KEYS)
        lengths = {n: len(PROMPTS[n // K]) - 1 + len(ids[n // K][n % K]) for n in (0, 2, 3)}
        given = {n: (length, [ids[n // K][n % K][-1], *[9] * n]) for n, length in lengths.items()}
        with recorded() as record:
            turns, _ = engine.go_on(given, KEYS.flatten()[:3] + 1)
        found.append((ids, turns))
        assert record.places()[RESULTS] == 1
        assert set(record.places()) == {LOOK, RESULTS}
    assert found[0] == found[1]
    assert record.launches["graph"]


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_products_of_several_layers_give_the_same_and_follow_the_weights(family):
    """Also those that an optimizer writes, and weights that have moved. They take no memory beside
    the weights'.
    """
    policy = PackedModel(random_model(family)).to("cuda")
    names, optimizer = (
        [*dict(policy.named_parameters())],
        torch.optim.SGD(policy.parameters(), lr=1.0),
    )
    engine, alone = make_engine(policy, graph=True), make_engine(policy, graph=False)
    alone.products, before = None, torch.cuda.memory_allocated()
    with engine.products.used():
        assert torch.cuda.memory_allocated() <= before
    graphs = []
    for update in range(3):
        ids, logprobs = engine.run(PROMPTS, KEYS)
        graphs.append(engine.graph.graph)
        if update:
            expected, expected_logprobs = alone.run(PROMPTS, KEYS)
            assert ids == expected
            for ours, theirs in zip(chain(*logprobs), chain(*expected_logprobs), strict=True):
                assert ours == pytest.approx(theirs, abs=1e-5)
        for parameter in policy.parameters():
            parameter.grad = parameter.detach().sign().mul_(0.01)
        optimizer.step()
        optimizer.zero_grad()
        if update == 1:
            layer = policy.layers()[0].self_attn.k_proj
            layer.weight.data = layer.weight.data.clone()
    assert graphs[0] is graphs[1] is not graphs[2]
    assert [*dict(policy.named_parameters())] == names


def test_launches_of_a_step():
    counts = []
    for layers in (1, 2):
        engine = make_engine(make_policy(layers=layers), graph=False)
        engine.run(PROMPTS, KEYS)
        engine.queue.fill(PROMPTS, KEYS)
        with engine.without_gradients(), recorded() as record:
            engine.step()
        assert not record.waits
        counts.append(record.launches.total())
    layer = counts[1] - counts[0]
    assert layer <= LAYER
    assert counts[0] - layer <= STEP


def test_top_p_takes_one_copy_of_the_logits_and_not_six_as_if_it_sorted_them():
    logits, slots = torch.randn(4, 8192).to("cuda"), torch.arange(4).to("cuda")
    for impl, copies, launches in ((None, 1.25, 51), ("eager", 6.25, 56)):
        gc.collect()  # what the interpreter's objects hold in circles
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with recorded() as record:
            sample_tokens(logits, slots, slots, top_p=0.9, impl=impl)
        assert (torch.cuda.max_memory_allocated() - before) / logits.nbytes == pytest.approx(
            copies, rel=0.02
        )
        assert record.launches.total() <= launches


@pytest.mark.parametrize("returned", [True, False])
def test_updates_capture_nothing_anew_unless_memory_moves(returned, tokenizer, monkeypatch):
    """Neither does another longest prompt, nor fewer prompts."""
    if not returned:
        monkeypatch.setattr(Engine, "release_memory", lambda _: None)
    begun, begin = [], torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "capture_begin",
        lambda graph, **_: begun.append(graph) or begin(graph),
    )
    policy = make_policy()
    sampler = EngineSampler(policy, tokenizer, max_response_tokens=6, batch_size=4)
    engines, addresses = set(), []
    for update in range(5):
        prompts = [
            Prompt("", [3, *range(4, 5 + update), 6], number=n)
            for n in range(3 if update % 2 else 4)
        ]
        sampler(prompts, K, update)
        engines.add(sampler.engine)
        addresses.append(sampler.engine.graph.addresses)
        # What an update takes beside the weights, for a while.
        labels = (
            torch.zeros(2, 4, policy.model.config.vocab_size, device="cuda").log_softmax(-1).mean()
        )
        assert not labels.isnan()
        with torch.no_grad():
            torch._foreach_mul_([*policy.parameters()], 1.01)
    moves = sum(before != after for before, after in pairwise(addresses))
    assert len(engines) == 1
    assert len(begun) == sampler.engine.graph.captures == 1 + moves
    assert returned or moves == 0


def test_a_step_that_waits_is_not_captured_and_the_process_goes_on():
    engine = make_engine(make_policy(rope_parameters=DYNAMIC), graph=True)
    assert engine.run(PROMPTS, KEYS)[0]
    assert engine.graph.fails
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_graph_serves_until_a_tensor_moves(monkeypatch):
    """All captures share a stream, each waits for the work before it, and the work after it for
    that.
    """
    waited, modes, begin = [], [], torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.Stream, "wait_stream", lambda stream, other: waited.append((stream, other))
    )

    def noted(graph, *arguments, **options):
        modes.append(options)
        begin(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", noted)
    weight, total, steps = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda"), []
    graph = StepGraph(torch.device("cuda"))

    def step():
        steps.append(torch.cuda.current_stream())
        total.add_(weight)

    graph.ready(step, [weight])()
    weight.add_(1.0)
    graph.ready(step, [weight])()
    # Two steps as they come, and the one that is captured.
    assert (len(steps), total.tolist()) == (3, [5.0] * 3)
    weight.data = torch.full((3,), 10.0, device="cuda")
    graph.ready(step, [weight])()
    assert (len(steps), total.tolist()) == (6, [35.0] * 3)
    current, (side,) = torch.cuda.current_stream(), set(steps)
    assert current != side
    assert [pair for pair in waited if current in pair] == [(side, current), (current, side)] * 2
    assert [options["capture_error_mode"] for options in modes] == ["thread_local"] * 2


def test_a_step_that_waits_is_not_captured_and_the_first_step_is_not_excused(monkeypatch):
    monkeypatch.setattr(logger, "warning", warning := MagicMock())
    steps, graph = [], StepGraph(torch.device("cuda"))

    def step():
        steps.append(torch.ones((), device="cuda").item())

    for _ in range(2):
        assert graph.ready(step, []) is step
    assert (len(steps), torch.cuda.get_sync_debug_mode()) == (1, 0)
    with pytest.raises(MemoryError):
        StepGraph(torch.device("cuda")).ready(MagicMock(side_effect=MemoryError), [])
    warning.assert_called_once()
