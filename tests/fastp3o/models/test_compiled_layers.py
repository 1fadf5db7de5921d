"""Layers that torch compiles. The suite traces them as for the compiler; `-m compiled` compiles
them.
"""

import copy
from itertools import chain

import pytest
import torch
from torch._dynamo.utils import counters

from fastp3o.models import packed_model
from fastp3o.models.packed_model import PackedModel, eager_forward, labeled_logprobs
from tests.fastp3o.models import model_families as families
from tests.fastp3o.rollouts.test_engine import RESPONSE_TOKENS, sample

# Rows of other lengths, with segments of one token and prompts that are shared once, three times or
# never. Lengths are equal by chance to one another, to sizes of the model and to numbers of
# segments.
RAGGED = [
    families.PAIRS,
    families.FOURS,
    families.FOURS.replaced(0, 0, [5, 6, 7, 8, 9, 10, 11]),
    families.FOURS.replaced(0, 2, [5]),
    families.Groups([[3]], [[[4], [5]]]),
    families.Groups([[3, 4]], [[[4], [5]]]),
    families.Groups([[3]] * 4, [[[4], [5]]] * 4),
]
OTHERS = [families.PAIRS.replaced(0, 0, [5, 6, 7]), families.FOURS.replaced(1, 1, [5, 6, 7, 8, 9])]


@pytest.fixture(autouse=True)
def counted():
    torch.compiler.reset()
    packed_model.compiled.cache_clear()
    counters.clear()


def trace_only(monkeypatch) -> None:
    """Traces as for the compiler, which would take most of a minute."""
    run = torch.compile(eager_forward, dynamic=True, backend="aot_eager")
    monkeypatch.setattr(packed_model, "compiled", lambda: run)


@pytest.mark.parametrize(
    ("family", "compiles"),
    [
        *(pytest.param(family, False, marks=pytest.mark.nightly) for family in families.FAMILIES),
        *(
            pytest.param(f, True, marks=pytest.mark.compiled)
            for f in ("llama", "qwen3", "gemma2", "gemma3", "gpt2")
        ),
    ],
)
def test_compiled_layers_are_as_exact_as_plain_ones_for_rows_of_any_length(
    family, compiles, monkeypatch
):
    """Their errors against fp64 are at most twice those of plain layers, over all gradients."""
    if not compiles:
        trace_only(monkeypatch)
    exact = families.alone(families.random_model(family).double(), families.FOURS)
    eager = families.packed(PackedModel(families.random_model(family)), families.FOURS, exact)
    model = PackedModel(families.random_model(family))
    model.compile_layers()
    got = families.packed(model, families.FOURS, exact)
    assert counters["stats"]["unique_graphs"]
    families.assert_equal(got, eager)
    errors = [
        sum(
            (outcome.gradients[name] - gradient).square().sum().item()
            for name, gradient in exact.gradients.items()
        )
        for outcome in (got, eager)
    ]
    assert 0 < errors[0] <= 4 * errors[1]
    assert abs(got.loss - exact.loss) <= 2 * abs(eager.loss - exact.loss) + 1e-6
    # Rows have the same bits with and without gradients, and those of other lengths take no further
    # graphs.
    for rows in (RAGGED, OTHERS):
        before = counters["stats"]["unique_graphs"]
        for groups in rows:
            row = groups.row()
            with torch.no_grad():
                without = labeled_logprobs(model, row)
            logprobs = labeled_logprobs(model, row)
            assert torch.equal(logprobs, without)
            assert logprobs.requires_grad
            assert not without.requires_grad
            logprobs.sum().backward()
        assert counters["stats"]["unique_graphs"] == before or rows is RAGGED


@pytest.mark.parametrize(
    ("family", "static", "compiles"),
    [
        ("llama", True, False),
        *(
            pytest.param(family, False, False, marks=pytest.mark.nightly)
            for family in ("LoRA", "gemma2", "gpt2")
        ),
        *(
            pytest.param("LoRA", static, True, marks=pytest.mark.compiled)
            for static in (True, False)
        ),
    ],
)
def test_rollouts_take_no_further_graphs_for_other_shapes(family, static, compiles, monkeypatch):
    if not compiles:
        trace_only(monkeypatch)
    policy = (
        families.adapted("llama")
        if family == "LoRA"
        else PackedModel(families.random_model(family))
    )
    expected, exact = sample(policy)
    policy.compile_layers()
    sample(policy, static=static)
    graphs = counters["stats"]["unique_graphs"]
    ids, logprobs = sample(policy, static=static, slots=18 - 11 * static, room_beyond=2)
    assert ids == expected
    assert torch.allclose(
        *(torch.tensor([*chain(*chain(*numbers))]) for numbers in (logprobs, exact)), atol=2e-5
    )
    with policy.with_own_attention() as inner:
        inner.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert counters["stats"]["unique_graphs"] == graphs > 0


def test_the_engine_runs_every_layer_compiled_in_its_prefill_and_in_each_step(monkeypatch):
    layers, calls = 2, []

    def counting(layer, *args, **kwargs):
        calls.append(layer)
        return eager_forward(layer, *args, **kwargs)

    monkeypatch.setattr(packed_model, "compiled", lambda: counting)
    policy = PackedModel(families.random_model("llama", num_hidden_layers=layers))
    policy.compile_layers()
    # The steps go on to the limit: one response at least is that long.
    ids, _ = sample(policy, static=True)
    assert max(len(response) for group in ids for response in group) == RESPONSE_TOKENS
    assert len(set(calls)) == layers
    assert len(calls) >= layers * (1 + RESPONSE_TOKENS - 1)


def test_names_stay_and_a_copy_runs_its_own_layers(monkeypatch):
    monkeypatch.setattr(packed_model, "compiled", lambda: eager_forward)
    model = PackedModel(families.random_model("llama"))
    names = [*model.state_dict()]
    model.compile_layers()
    again = copy.deepcopy(model)
    assert [*model.state_dict()] == [*again.state_dict()] == names
    with torch.no_grad():
        before = labeled_logprobs(model, families.PAIRS.row())
        for parameter in again.parameters():
            parameter.zero_()
        assert torch.equal(labeled_logprobs(model, families.PAIRS.row()), before)
        assert not torch.equal(labeled_logprobs(again, families.PAIRS.row()), before)
