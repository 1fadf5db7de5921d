"""What a run leaves in the folders of its models: weights, adapters and a card."""

import os
from pathlib import Path

import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.run.card import Training
from fastp3o.training import sft
from fastp3o.training.config import RewardModelConfig, SFTConfig
from tests.fastp3o.runs import assert_equal, weights

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
    modes = {path.stat().st_mode & 0o777 for name in ("model", "adapter") for path in Path("both", name).iterdir()}
    os.umask(umask := os.umask(0))
    assert modes == {0o666 & ~umask}
    # A finished run saves the other way when it is resumed.
    fine_tune(tiny_model, "both", lora_save="merged", save_every=2, resume=True)
    assert names("both") == names("merged")
    fine_tune(tiny_model, "both", lora_save="adapter", save_every=2, resume=True)
    assert names("both") == names("adapter")
    assert_equal(adapter("both/adapter"), adapter("adapter/adapter"))


def made(settings: RewardModelConfig | P3OConfig, stage: str = "SFT", **kind: bool) -> str:
    training = Training(settings, stage, 3, 7, "fp32", Path("eval.jsonl"))
    return training.card(**({"classifies": False, "adapter": False} | kind))


def test_a_card_names_what_the_hub_has_and_no_address_key_or_folder(workplace):
    settings = {"model": "organisation/model", "output_dir": "/home/me/secret", "reward_timeout": 7.0}
    settings |= {"prompts": "b/data:config,/home/me/data.jsonl,a/data", "report_to": "none"}
    settings |= {"reward": "organisation/judge,https://me:hunter2@internal.example/score?key=hunter2"}
    settings |= {"sampler": "vllm", "vllm_url": "http://internal.example:8000"}
    found = ModelCard(made(P3OConfig(**settings), adapter=True))
    assert (found.data.base_model, found.data.base_model_relation) == ("organisation/model", "adapter")
    assert found.data.datasets == ["a/data", "b/data"]
    assert "- reward: organisation/judge, an endpoint" in found.text
    assert "`data.jsonl`, a local one" in found.text
    assert "vllm" in found.text  # the sampler, a choice
    assert not any(secret in str(found) for secret in ("hunter2", "internal.example", "home", "secret"))
    assert ModelCard(made(P3OConfig(**settings))).data.base_model_relation == "finetune"
    judging = RewardModelConfig(model="/home/me/base", output_dir="o", train_data="t", centring=0.5)
    judge = ModelCard(made(judging, "reward model", classifies=True))
    assert judge.data.pipeline_tag == "text-classification"
    assert judge.data.tags == ["fastp3o", "reward-model", "rlhf"]
    assert "home" not in str(judge)
