"""Layers with one input as one product, on a CPU, where the engine leaves them alone."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

from fastp3o.models import joint_products
from fastp3o.models.joint_products import JointProducts, in_shared_memory, lie_in
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.sampling_copy import SamplingCopy
from fastp3o.rollouts.engine import layer_shapes
from tests.fastp3o.models.model_families import FAMILIES, PAIRS, adapted, random_model

ROW = PAIRS.row()
# Layers of each of two blocks that get one input. Families with one layer for q, k and v have none.
GROUPS = dict.fromkeys(FAMILIES, ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}))
GROUPS |= {"opt": ({"q_proj", "k_proj", "v_proj"},), "gpt2": (), "gpt_neox": ()}


def joint_products_of(model: PackedModel) -> JointProducts:
    return JointProducts(model, lambda: layer_shapes(model, 0))


@torch.no_grad()
def logprobs(model: PackedModel) -> torch.Tensor:
    return labeled_logprobs(model, ROW)


def names(model: nn.Module, group: list[nn.Linear]) -> set[str]:
    return {name.rpartition(".")[2] for name, module in model.named_modules() if module in group}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_one_input_compute_as_one_and_follow_their_weights(family, monkeypatch):
    model = PackedModel(random_model(family))
    products, parameters = joint_products_of(model), dict(model.named_parameters())
    assert [names(model, group) for group in products.groups] == [*GROUPS[family]] * 2
    widths, linear = [], F.linear
    monkeypatch.setattr(
        joint_products.F, "linear", lambda x, *w: widths.append(len(w[0])) or linear(x, *w)
    )
    expected_widths = [sum(layer.out_features for layer in group) for group in products.groups]
    addresses = []
    for factor in (1.0, 1.1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(factor)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        expected = logprobs(model)
        widths.clear()
        with products.used():
            torch.testing.assert_close(logprobs(model), expected, atol=1e-6, rtol=1e-6)
        assert [width for width in widths if width in expected_widths] == expected_widths
        assert torch.equal(logprobs(model), expected)
        assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
        addresses.append([parameter.data_ptr() for parameter in model.parameters()])
    assert addresses[0] == addresses[1]
    assert all(ours is parameters[name] for name, ours in model.named_parameters())


def gradients(model: PackedModel) -> dict[str, torch.Tensor]:
    labeled_logprobs(model, ROW).sum().backward()
    return {
        name: parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_nothing_that_trains_or_saves_sees_it(family, tmp_path):
    model, plain = PackedModel(random_model(family)), PackedModel(random_model(family))
    products = joint_products_of(model)
    with products.used():
        logprobs(model)
    assert not any("forward" in vars(layer) for group in products.groups for layer in group)
    for one in (model, plain):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        gradients(one)
        optimizer.step()
    ours, theirs = gradients(model), gradients(plain)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name, one in (("ours", model), ("theirs", plain)):
        one.model.save_pretrained(tmp_path / name)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    # safetensors itself refuses weights that share memory.
    save_file(
        {name: weight for name, weight in model.state_dict().items() if "layers" in name},
        tmp_path / "alone",
    )


def test_adapters_and_compiled_layers_compute_as_ever(monkeypatch):
    assert joint_products_of(adapted("llama")).groups == []
    model = PackedModel(random_model("llama"))
    monkeypatch.setattr(model, "compiled", True)
    assert joint_products_of(model).groups == []


def test_layers_with_hooks_or_other_classes_compute_alone():
    class Other(nn.Linear):
        pass

    model = PackedModel(random_model("llama"))
    first, second = model.layers()
    first.self_attn.q_proj.__class__ = Other
    first.mlp.up_proj.register_forward_hook(lambda *_: None)
    vars(second.self_attn.v_proj)["forward"] = nn.Linear.forward.__get__(second.self_attn.v_proj)
    expected = [{"k_proj", "v_proj"}, {"q_proj", "k_proj"}, {"gate_proj", "up_proj"}]
    assert [names(model, group) for group in joint_products_of(model).groups] == expected


def products_of(*parts: torch.Tensor) -> JointProducts:
    """Of one group of layers with these weights."""
    products, layers = joint_products_of(PackedModel(random_model("gpt2"))), []
    for part in parts:
        layers.append(nn.Linear(1, 1, bias=False))
        layers[-1].weight = nn.Parameter(part)
    products.groups = [layers]
    return products


def test_parameters_without_memory_of_their_own_stay_where_they_are():
    memory = torch.randn(5, 4)
    products = products_of(memory[:2], memory[3:])
    addresses = [layer.weight.data_ptr() for layer in products.groups[0]]
    assert products.side_by_side(0, "weight") is None
    assert [layer.weight.data_ptr() for layer in products.groups[0]] == addresses
    assert torch.equal(products_of(memory[1:2], memory[2:4]).side_by_side(0, "weight"), memory[1:4])
    # In another order they would be other layers' outputs.
    assert products_of(memory[2:4], memory[1:2]).side_by_side(0, "weight") is None
    assert products_of(memory[3:5], memory[:1]).side_by_side(0, "weight") is None
    assert products_of(torch.ones(2, 4), torch.ones(2, 3)).side_by_side(0, "weight") is None
    assert products.side_by_side(0, "bias") is None


def test_parameters_that_others_have_moved_come_together_again():
    parts = [torch.randn(n, 4) for n in (2, 3)]
    products = products_of(*(part.clone() for part in parts))
    parameters = [layer.weight for layer in products.groups[0]]
    first = products.side_by_side(0, "weight")
    assert products.side_by_side(0, "weight") is first
    assert [part.untyped_storage().nbytes() for part in parameters] == [
        part.nbytes for part in parts
    ]
    with torch.no_grad():
        first.mul_(2.0)
    assert all(
        torch.equal(part, 2 * before) for part, before in zip(parameters, parts, strict=True)
    )
    parameters[1].data = parts[1].clone()
    again = products.side_by_side(0, "weight")
    assert torch.equal(again, torch.cat([2 * parts[0], parts[1]]))
    assert lie_in(again, parameters)
    assert not lie_in(first, parameters)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_sampled_copy_has_such_weights_side_by_side_in_its_own_memory(family):
    model = PackedModel(random_model(family, hidden_size=128, head_dim=128, num_attention_heads=1))
    sampled = SamplingCopy(model, torch.device("cpu"), torch.bfloat16)
    copied = sampled.model
    with sampled.gathered(model):
        expected, addresses = (
            logprobs(copied),
            [parameter.data_ptr() for parameter in copied.parameters()],
        )
        products = joint_products_of(copied)
        assert len(products.groups) == 4
        for group in products.groups:
            assert in_shared_memory([layer.weight for layer in group]) is not None
            assert (
                group[0].bias is None
                or in_shared_memory([layer.bias for layer in group]) is not None
            )
        with products.used():
            torch.testing.assert_close(logprobs(copied), expected, atol=0.05, rtol=0)
        assert [parameter.data_ptr() for parameter in copied.parameters()] == addresses
    assert sampled.memory.untyped_storage().nbytes() == 0
