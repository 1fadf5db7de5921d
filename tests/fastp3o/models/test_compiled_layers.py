"""Layers that torch compiles. The suite traces them as for the compiler; `-m compiled` compiles them."""

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fastp3o.models import compiled_layers
from fastp3o.models.one_by_one import attend_flat, flat, gather_keys, one_by_one
from fastp3o.models.packed_model import PackedModel, labelled_logprobs
from fastp3o.models.trainable import add_lora, freeze_below
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o.models.model_families import (
    FAMILIES,
    FOURS,
    PAIRS,
    Groups,
    alone,
    assert_equal,
    enlarge,
    packed,
    random_model,
)
from tests.fastp3o.rollouts.test_engine import PROMPTS, K, make_engine
from tests.fastp3o.together import together

# Rows of other lengths, with segments of one token and prompts that are shared once, three times or never. Lengths are
# equal by chance to one another, to sizes of the model and to numbers of segments.
RAGGED = [
    PAIRS,
    FOURS,
    FOURS.replaced(0, 0, [5, 6, 7, 8, 9, 10, 11]),
    FOURS.replaced(0, 2, [5]),
    Groups([[3]], [[[4], [5]]]),
    Groups([[3, 4]], [[[4], [5]]]),
    Groups([[3]] * 4, [[[4], [5]]] * 4),
]


@pytest.fixture
def traced(monkeypatch):
    """Traces as for the compiler, which would take most of a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def counted():
    torch.compiler.reset()
    counters.clear()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def compiled(model: PackedModel) -> PackedModel:
    model.compile_layers()
    return model


def adapted(family: str) -> PackedModel:
    model = PackedModel(random_model(family))
    add_lora(model, rank=3, alpha=6.0, targets="all-linear")
    enlarge(nn.ParameterList(parameter for parameter in model.parameters() if parameter.requires_grad))
    return model


def as_exact_as_eager(family: str) -> PackedModel:
    """A compiled model whose errors against fp64 are at most twice those of plain layers, over all gradients."""
    exact, rollout = alone(random_model(family).double(), FOURS)
    eager = packed(PackedModel(random_model(family)), FOURS, rollout)
    model = compiled(PackedModel(random_model(family)))
    got = packed(model, FOURS, rollout)
    assert not model.layers()[0].forward.compiled.fails
    assert_equal(got, eager)
    errors = [
        sum((outcome.gradients[name] - gradient).square().sum().item() for name, gradient in exact.gradients.items())
        for outcome in (got, eager)
    ]
    assert 0 < errors[0] <= 4 * errors[1]
    assert abs(got.loss - exact.loss) <= 2 * abs(eager.loss - exact.loss) + 1e-6
    return model


def fits_rows_of_any_length(model: PackedModel, kinds: int) -> None:
    """Rows of any length take one graph for each kind of layer, and the same bits with and without gradients."""
    for groups in RAGGED:
        row = groups.row()
        with torch.no_grad():
            before = labelled_logprobs(model, row)
        logprobs = labelled_logprobs(model, row)
        assert torch.equal(logprobs, before)
        assert logprobs.requires_grad
        assert not before.requires_grad
        logprobs.sum().backward()
    assert graphs() == kinds
    assert not model.layers()[0].forward.compiled.fails


def test_one_graph_for_rows_of_any_length_is_as_exact_as_plain_layers(traced):
    fits_rows_of_any_length(as_exact_as_eager("llama"), 1)


# Gemma's layers are of two kinds, with and without a window.
@pytest.mark.compiled
@pytest.mark.parametrize(("family", "kinds"), [("llama", 1), ("qwen3", 1), ("gemma2", 2), ("gemma3", 2), ("gpt2", 1)])
def test_so_is_what_torch_compiles(family, kinds):
    fits_rows_of_any_length(as_exact_as_eager(family), kinds)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_so_are_graphs_of_every_family(family, traced):
    fits_rows_of_any_length(as_exact_as_eager(family), 2 if family.startswith("gemma") else 1)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_the_same_bits_with_and_without_gradients(dtype):
    fits_rows_of_any_length(compiled(PackedModel(random_model("llama").to(dtype))), 1)


@pytest.mark.compiled
def test_so_has_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fits_rows_of_any_length(compiled(PackedModel(random_model("llama"))), 1)


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointed", [False, True])
def test_adapters_and_their_base(checkpointed, traced):
    model = adapted("llama")
    with model.with_own_attention() as inner:
        expected, rollout = alone(inner, PAIRS)
    if checkpointed:
        model.recompute_activations()
    compiled(model).train()
    assert_equal(packed(model, PAIRS, rollout), expected)
    # The first layer's input needs no gradient, so it has a graph of its own; transformers lets it need one where
    # activations are computed again.
    fits_rows_of_any_length(model, 1 if checkpointed else 2)
    model.model.disable_adapters()
    with torch.no_grad():
        base = labelled_logprobs(model, PAIRS.row())
    expected, _ = alone(random_model("llama"), PAIRS)
    order = PAIRS.order(PAIRS.row())
    torch.testing.assert_close(base, torch.cat([expected.logprobs[s] for s in order]), atol=2e-5, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_top_layers_that_train_and_those_below(family, traced):
    plain, model = (PackedModel(random_model(family)) for _ in range(2))
    for each in (plain, model):
        freeze_below(each, 1)
    _, rollout = alone(random_model(family), FOURS)
    assert_equal(packed(compiled(model), FOURS, rollout), packed(plain, FOURS, rollout))


@pytest.mark.nightly
def test_two_processes_that_share_a_model(tmp_path):
    done = together(Path(__file__).with_name("compiled_process.py"), str(tmp_path / "results"))
    assert done.returncode == 0, done.stdout
    for name, (error, graphs) in torch.load(tmp_path / "results").items():
        assert error < 1e-6, name
        assert graphs <= 2, name


def test_rollouts_run_uncompiled(traced):
    policy = PackedModel(random_model("llama"))
    keys = response_keys(3, torch.arange(len(PROMPTS)), K)
    expected = make_engine(policy).run(PROMPTS, keys)
    assert make_engine(compiled(policy)).run(PROMPTS, keys) == expected
    with policy.with_own_attention() as inner:
        inner.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    assert graphs() == 0


def test_names_stay_and_a_copy_runs_its_own_layers(traced):
    model = PackedModel(random_model("llama"))
    names = [*model.state_dict()]
    again = copy.deepcopy(compiled(model))
    assert [*model.state_dict()] == [*again.state_dict()] == names
    with torch.no_grad():
        before = labelled_logprobs(model, PAIRS.row())
        for parameter in again.parameters():
            parameter.zero_()
        assert torch.equal(labelled_logprobs(model, PAIRS.row()), before)
        assert not torch.equal(labelled_logprobs(again, PAIRS.row()), before)


@pytest.mark.parametrize("when", ["forward", "backward", "later"])
def test_layers_that_do_not_compile_run_as_they_are_and_say_why_once(when, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(compiled_layers.logger, "warning", said.append)

    passes: list[bool] = []

    def backend(graph, inputs):
        if when == "forward" or passes:
            raise RuntimeError("no compiler was found")
        return graph.forward

    if when == "backward":
        monkeypatch.setattr(torch, "compile", lambda function, **_: partial(run_broken, function))
    else:
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model, plain = compiled(PackedModel(random_model("llama"))).train(), PackedModel(random_model("llama")).train()
    if when == "later":
        labelled_logprobs(model, PAIRS.row())
        assert not said
        passes.append(True)
        model.double()
        plain.double()
    for groups in (PAIRS, FOURS):
        got, expected = labelled_logprobs(model, groups.row()), labelled_logprobs(plain, groups.row())
        torch.testing.assert_close(got, expected)
        got.sum().backward()
    (message,) = [warning for warning in said if "run uncompiled" in warning]
    assert "no compiler was found" in message


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("no compiler was found")


def run_broken(function, *args, **kwargs):
    return Broken.apply(function(*args, **kwargs))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_operations_of_tensors_alone_equal_those_of_segments(window, softcap):
    segments = FOURS.row().segments
    tensors = flat(segments)
    generator = torch.Generator().manual_seed(0)
    sizes = (4, 2, 2)
    inputs = [
        torch.randn(len(segments.shared.own), heads, 8, dtype=torch.float64, generator=generator) for heads in sizes
    ]
    results = []
    for each in (segments, tensors):
        query, key, value = (tensor.clone().requires_grad_() for tensor in inputs)
        gathered = (gather_keys(tensor, each.shared) for tensor in (key, value))
        output = one_by_one(query, *gathered, each, 0.3, window, softcap)
        weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
        results.append([output, *torch.autograd.grad((output * weights).sum(), (query, key, value))])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=1e-12)
    assert (tensors.longest_query, tensors.longest_keys) == (segments.longest_query, segments.longest_keys)


def test_what_the_compiler_is_told_of_the_operations_is_true():
    shared = flat(FOURS.row().segments).shared
    tokens = torch.randn(len(shared.own), 2, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.fastp3o.gather_keys.default, (tokens, *shared))
    query, key, value = (torch.randn(9, heads, 4, requires_grad=True) for heads in (4, 2, 2))
    arguments = query, key, value, torch.tensor([4, 5, 4, 5]), 0.5, None, None
    torch.library.opcheck(attend_flat._opoverload, arguments)
