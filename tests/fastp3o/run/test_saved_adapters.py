"""What runs with adapters leave in their folders, and that later runs begin with it."""

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.training import reward_model, sft
from fastp3o.training.config import RewardModelConfig, SFTConfig
from fastp3o.training.loop import train
from tests.fastp3o.runs import assert_equal, config, metrics, weights

SUPERVISED = {"batch_size": 4, "epochs": 2, "max_response_tokens": 20, "report_to": "none", "precision": "fp32"}
SUPERVISED |= {"learning_rate": 1e-2, "lora_rank": 2}


def fine_tune(model: str, folder: str, **changes) -> None:
    settings = SUPERVISED | {"model": model, "output_dir": folder, "train_data": "sft.jsonl"}
    sft.train(SFTConfig(**(settings | changes)))


def adapter(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()} - {"state", "config.yaml", "metrics.jsonl", "fastp3o.lock"}


def test_each_choice_saves_its_folders(workplace, tiny_model):
    for choice in ("both", "merged", "adapter"):
        fine_tune(tiny_model, choice, lora_save=choice, save_every=2)
    assert names("both") == {"model", "adapter", "checkpoint-000002", "checkpoint-000004"}
    assert names("merged") == {"model", "checkpoint-000002", "checkpoint-000004"}
    assert names("adapter") == {"adapter", "checkpoint-000002", "checkpoint-000004"}
    assert names("adapter/checkpoint-000002") == {"adapter"}
    assert "adapter" in names("both/checkpoint-000002")
    assert "adapter" not in names("merged/checkpoint-000002")
    assert_equal(weights("both"), weights("merged"))
    assert_equal(adapter("both/adapter"), adapter("adapter/adapter"))
    assert_equal(adapter("both/checkpoint-000004/adapter"), adapter("both/adapter"))
    assert_equal(adapter("both/checkpoint-000002/adapter"), adapter("adapter/checkpoint-000002/adapter"))
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), "adapter/adapter")
    merged = merged.merge_and_unload().state_dict()
    assert all(torch.allclose(merged[name], weight, atol=1e-6) for name, weight in weights("both").items())
    assert len({path.stat().st_mode & 0o777 for path in Path("both/adapter").iterdir()}) == 1
    # A finished run saves the other way when it is resumed.
    fine_tune(tiny_model, "both", lora_save="merged", save_every=2, resume=True)
    assert names("both") == names("merged")
    fine_tune(tiny_model, "both", lora_save="adapter", save_every=2, resume=True)
    assert names("both") == names("adapter")
    assert_equal(adapter("both/adapter"), adapter("adapter/adapter"))


def test_later_stages_begin_with_an_adapter(workplace, tiny_model):
    """The adapter's folder serves in every place where the merged model does."""
    fine_tune(tiny_model, "sft")
    settings = SUPERVISED | {"model": "sft/adapter", "output_dir": "rm", "train_data": "preferences.jsonl"}
    with pytest.raises(UserError, match="no adapter itself"):
        reward_model.train(RewardModelConfig(**settings, lora_save="adapter"))
    # The merged model is the base that the reward model's adapter names.
    reward_model.train(RewardModelConfig(**settings | {"model": "sft/model"}))
    shared = {"updates": 2, "learning_rate": 1e-2}
    for name, model, reward in (("merged", "sft/model", "rm/model"), ("adapters", "sft/adapter", "rm/adapter")):
        train(config(model, name, reward=reward, **shared))
    for merged, adapters in zip(metrics("merged"), metrics("adapters"), strict=True):
        assert adapters["reward"] == pytest.approx(merged["reward"], abs=1e-4)
    assert load_reward_model("rm/adapter").model.score.weight.abs().max() > 0
    # A run that begins with an adapter has no adapter of its own to name a base for.
    train(config("sft/adapter", "again", reward="rm/adapter", lora_rank=2, **shared))
    assert "adapter" not in names("again")
    assert load_policy("again/model").model.name_or_path == "again/model"
