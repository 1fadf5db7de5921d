"""Adapters as they are saved: by base and adapter everyone gets the model that trained."""

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fastp3o.config import StageConfig, TrainableConfig
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.merging import whole_model
from fastp3o.models.packed_model import PackedModel, labeled_logprobs, scores
from fastp3o.models.save import adapter_config, adapter_weights, base_name, write_adapter
from fastp3o.models.tokenizer import load_tokenizer
from fastp3o.models.trainable import choose_trainable
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.runtime.precision import choose_precision
from tests.fastp3o.models.model_families import FAMILIES, PAIRS, enlarge_trained, random_model

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
LORA = TrainableConfig(lora_rank=3, lora_alpha=6.0)


def trained(model: PackedModel, precision: str = "fp32", lora: TrainableConfig = LORA) -> Optimizer:
    """A model with adapters that are far from zero."""
    choose_trainable(model, lora)
    enlarge_trained(model)
    config = StageConfig(model="", output_dir="")
    return Optimizer(
        Accelerator(cpu=True), model, choose_precision(precision, precision), config, 1
    )


def saved(optimizer: Optimizer, folder: Path) -> str:
    model = optimizer.model.model
    write_adapter(folder, adapter_config(model), adapter_weights(optimizer.parameters))
    return str(folder)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).logits


def require_same_logprobs(model: PackedModel, folder: str) -> None:
    row = PAIRS.row()
    with torch.no_grad():
        expected = labeled_logprobs(model, row)
        torch.testing.assert_close(
            labeled_logprobs(load_policy(folder), row), expected, atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_base_and_adapter_are_the_policy_that_trained(family, tmp_path):
    """Embeddings that are tied to the head may be adapted, too."""
    random_model(family).save_pretrained(tmp_path / "base")
    lora = (
        TrainableConfig(lora_rank=3, lora_targets="embed_tokens,q_proj")
        if family == "gemma2"
        else LORA
    )
    optimizer = trained(load_policy(str(tmp_path / "base")), lora=lora)
    policy = optimizer.model
    folder = saved(optimizer, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", attn_implementation="eager")
    before = logits(base)
    with policy.with_own_attention() as own:
        expected = logits(own)
    by_peft = PeftModel.from_pretrained(base, folder)
    torch.testing.assert_close(logits(by_peft), expected, atol=1e-5, rtol=1e-5)
    assert (expected - before).abs().max() > 0.1
    require_same_logprobs(policy, folder)
    assert all(parameter.requires_grad for parameter in load_policy(folder).parameters())
    # So is the whole model that transformers loads, and the policy stays as it was.
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    policy.model.generation_config.temperature = 0.6
    whole, weights = whole_model(policy.model)
    assert whole.generation_config.temperature == 0.6
    assert policy.model.state_dict().keys() == before.keys()
    assert all(
        torch.equal(value, before[name]) for name, value in policy.model.state_dict().items()
    )
    whole.generation_config.temperature = 1.0
    whole.save_pretrained(tmp_path / "whole", state_dict=weights)
    require_same_logprobs(policy, str(tmp_path / "whole"))


def test_a_reward_models_head_goes_with_its_adapter_and_may_be_new(tiny_model, tmp_path):
    row = PAIRS.row()
    optimizer = trained(load_reward_model(tiny_model, new_head=True))
    folder = saved(optimizer, tmp_path / "reward")
    base = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    with optimizer.model.with_own_attention() as own:
        expected = logits(own)
    assert torch.equal(logits(PeftModel.from_pretrained(base, folder).eval()), expected)
    assert expected.abs().min() > 0
    with torch.no_grad():
        expected = scores(optimizer.model, row)
        torch.testing.assert_close(
            scores(load_reward_model(folder), row), expected, atol=1e-5, rtol=1e-5
        )
    folder = saved(trained(load_policy(tiny_model)), tmp_path / "policy")
    begun = load_reward_model(folder, new_head=True).model.base_model.state_dict()
    for name, weight in load_policy(folder).model.base_model.state_dict().items():
        assert torch.equal(begun[name], weight)
    with pytest.raises(ValueError, match="is not a trained reward model"):
        load_reward_model(folder)


def test_files_that_are_not_of_the_base_or_damaged_are_named(tiny_model, tmp_path):
    optimizer = trained(load_policy(tiny_model))
    weights, config = adapter_weights(optimizer.parameters), adapter_config(optimizer.model.model)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
    other = name.replace("layers.1", "layers.2")
    file = tmp_path / "adapter_model.safetensors"

    def require_refused(message: str) -> None:
        with pytest.raises(ValueError, match=f"^cannot load {tmp_path}: {message}"):
            load_policy(str(tmp_path))

    write_adapter(tmp_path, config, {key: weight for key, weight in weights.items() if key != name})
    require_refused(f"{file} lacks {name}$")
    write_adapter(tmp_path, config, weights | {other: weights[name].clone()})
    require_refused(f"{file} has {other}, which the base {tiny_model} lacks")
    for damaged in (file, tmp_path / "adapter_config.json"):
        write_adapter(tmp_path, config, weights)
        damaged.write_bytes(damaged.read_bytes()[:50])
        require_refused(f"{damaged} ")


def test_the_base_is_named_wherever_it_is_loaded_from_and_has_no_adapter(
    tiny_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(Path(tiny_model).parent)
    optimizer = trained(load_policy(f"./{Path(tiny_model).name}"))
    folder, again = (saved(optimizer, tmp_path / name) for name in ("adapter", "again"))
    with pytest.raises(ValueError, match=f"it holds only an adapter: use {folder}$"):
        load_tokenizer(str(tmp_path))
    contents = [
        {path.name: path.read_bytes() for path in Path(part).iterdir()} for part in (folder, again)
    ]
    assert contents[0] == contents[1]
    config = json.loads(contents[0]["adapter_config.json"])
    assert config["base_model_name_or_path"] == tiny_model
    assert config["target_modules"] == sorted(config["target_modules"])
    optimizer.model.model.name_or_path = "organization/model"
    assert base_name(optimizer.model.model) == "organization/model"
    # No checkpoint holds a base that had adapters merged.
    assert base_name(trained(load_policy(folder)).model.model) is None
    with pytest.raises(ValueError, match="no adapter itself"):
        choose_trainable(load_policy(folder), TrainableConfig(lora_rank=2, lora_save="adapter"))
    optimizer.model.model.name_or_path = folder
    second = saved(optimizer, tmp_path / "second")
    with pytest.raises(
        ValueError, match=f"cannot load {second}: .*{folder}, which is itself an adapter"
    ):
        load_policy(second)
