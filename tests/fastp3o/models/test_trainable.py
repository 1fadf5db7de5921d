import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from fastp3o.config import TrainableConfig
from fastp3o.models.loading import load_policy
from fastp3o.models.merging import whole_model
from fastp3o.models.packed_model import PackedModel, labeled_logprobs
from fastp3o.models.trainable import (
    SwitchedDropout,
    add_lora,
    choose_trainable,
    dropout_on,
    freeze_below,
)
from tests.fastp3o.models.model_families import FAMILIES, PAIRS, adapted, random_model

# The beginnings of names in the top layer, and in the norm above it.
LAYERS = {
    "gpt2": ("transformer.h.1.", "transformer.ln_f."),
    "gpt_neox": ("gpt_neox.layers.1.", "gpt_neox.final_layer_norm."),
    "opt": ("model.decoder.layers.1.", "model.decoder.final_layer_norm."),
}


def trained(model: PackedModel) -> set[str]:
    return {name for name, parameter in model.model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_layers_leave_the_top_and_the_last_norm(family):
    model = PackedModel(random_model(family))
    parts = LAYERS.get(family, ("model.layers.1.", "model.norm."))
    freeze_below(model, 1)
    assert trained(model) == {
        name for name in dict(model.model.named_parameters()) if name.startswith(parts)
    }
    assert all(any(name.startswith(part) for name in trained(model)) for part in parts)


def test_the_configuration_chooses_and_what_cannot_train_is_refused():
    def chosen(auto=AutoModelForCausalLM, labels=2, **settings):
        model = PackedModel(random_model("llama", auto, num_labels=labels))
        choose_trainable(model, TrainableConfig(**settings))
        return trained(model)

    everything = chosen()
    assert everything == {name for name, _ in random_model("llama").named_parameters()}
    layers = {name for name in everything if ".layers." in name}
    assert chosen(trainable_layers=2) == layers | {"model.norm.weight"}
    scored = chosen(AutoModelForSequenceClassification, 1, trainable_layers=2)
    assert scored == layers | {"model.norm.weight", "score.weight"}
    got = chosen(lora_rank=2, lora_targets="q_proj,v_proj")
    assert len(got) == 2 * 2 * 2
    assert all(("q_proj.lora_" in name) or ("v_proj.lora_" in name) for name in got)
    with pytest.raises(ValueError, match="--trainable_layers is 3, and the model has 2 layers"):
        freeze_below(PackedModel(random_model("llama")), 3)
    for targets in ("lm_head,down_proj", "no_such_layer"):
        with pytest.raises(ValueError, match=f"--lora_targets {targets}: "):
            add_lora(
                PackedModel(random_model("llama")),
                TrainableConfig(lora_rank=2, lora_targets=targets),
            )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_small_beside_a_weight_in_half_precision_is_saved(dtype, tmp_path):
    model = adapted("llama", targets="q_proj,embed_tokens")
    for name, parameter in model.named_parameters():
        parameter.data = (parameter.data * (1e-3 if "lora_" in name else 1)).to(dtype)
    layer = model.model.model.layers[0].self_attn.q_proj
    lora_a, lora_b = (part.default.weight.double() for part in (layer.lora_A, layer.lora_B))
    delta = 2 * lora_b @ lora_a
    assert 0 < delta.abs().max() < 1e-5
    whole, weights = whole_model(model.model, dtype)
    whole.save_pretrained(tmp_path, state_dict=weights)
    assert AutoConfig.from_pretrained(tmp_path).dtype == torch.float32
    saved = load_file(tmp_path / "model.safetensors")
    merged = {name for name, weight in saved.items() if weight.dtype == torch.float32}
    assert merged == {name for name in saved if "q_proj" in name or "embed_tokens" in name}
    name = "model.layers.0.self_attn.q_proj.weight"
    base = layer.base_layer.weight
    torch.testing.assert_close(saved[name].double() - base.double(), delta, atol=4e-8, rtol=0)
    loaded = load_policy(str(tmp_path)).model
    assert loaded.dtype == torch.float32
    assert all(
        torch.equal(weight.float(), loaded.state_dict()[name]) for name, weight in saved.items()
    )
    assert model.model.config.dtype != "float32"


def test_sharded_adapters_are_merged_as_they_are_in_passes():
    """Their parts are in fp32, and rounded in each pass."""
    model, rounded = adapted("llama"), adapted("llama")
    for parameter in rounded.parameters():
        parameter.data = parameter.data.half()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data if "lora_" in name else parameter.data.half()
    _, weights = whole_model(model.model, torch.float16)
    _, expected = whole_model(rounded.model, torch.float16)
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())


def test_adapters_have_dropout_within_passes_that_train_and_nowhere_else():
    """Activations that are computed again drop the same."""
    row = PAIRS.row()
    expected = labeled_logprobs(adapted("llama"), row)
    gradients = []
    for recomputes in (False, True):
        model = adapted("llama", dropout=0.25).train()
        assert sum(isinstance(module, SwitchedDropout) for module in model.modules()) == 14
        if recomputes:
            model.recompute_activations()
        assert torch.equal(labeled_logprobs(model, row), expected)
        torch.manual_seed(2)
        with dropout_on(model):
            logprobs = labeled_logprobs(model, row)
            logprobs.sum().backward()
        assert (logprobs - expected).abs().max() > 0.1
        with pytest.raises(RuntimeError, match="inside"), dropout_on(model):
            raise RuntimeError("inside")
        assert torch.equal(labeled_logprobs(model, row), expected)
        gradients.append(
            {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        )
    assert len(gradients[0]) == len(gradients[1]) == 28
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])
    (layer,) = [
        module for name, module in model.named_modules() if name.endswith("layers.0.mlp.up_proj")
    ]
    with dropout_on(model):
        dropped = layer.lora_dropout["default"](torch.ones(100_000))
    assert (dropped == 0).float().mean().item() == pytest.approx(0.25, abs=0.01)
