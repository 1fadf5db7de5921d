"""What a run leaves in the folders of its models: weights, adapters and a card."""

import json
import os
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.run.card import Training, public_reward
from fastp3o.training import sft
from fastp3o.training.config import RewardModelConfig, SFTConfig
from tests.fastp3o.runs import assert_equal, weights

SUPERVISED = {
    "batch_size": 4,
    "epochs": 2,
    "max_response_tokens": 20,
    "report_to": "none",
    "precision": "fp32",
}
SUPERVISED |= {"learning_rate": 1e-2, "lora_rank": 2}


def fine_tune(model: str, folder: str, **changes) -> None:
    settings = SUPERVISED | {"model": model, "output_dir": folder, "train_data": "sft.jsonl"}
    sft.train(SFTConfig(**(settings | changes)))


def adapter(folder: str) -> dict[str, torch.Tensor]:
    return load_file(Path(folder) / "adapter_model.safetensors")


def names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()} - {
        "state",
        "config.yaml",
        "metrics.jsonl",
        "fastp3o.lock",
    }


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
    assert_equal(
        adapter("both/checkpoint-000002/adapter"), adapter("adapter/checkpoint-000002/adapter")
    )
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_model), "adapter/adapter"
    )
    merged = merged.merge_and_unload().state_dict()
    assert all(
        torch.allclose(merged[name], weight, atol=1e-6) for name, weight in weights("both").items()
    )
    modes = {
        path.stat().st_mode & 0o777
        for name in ("model", "adapter")
        for path in Path("both", name).iterdir()
    }
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
    settings = {
        "model": "organization/model",
        "output_dir": "/home/me/secret",
        "reward_timeout": 7.0,
    }
    settings |= {"prompts": "b/data:config,/home/me/data.jsonl,a/data", "report_to": "none"}
    settings |= {
        "reward": "organization/judge,https://me:hunter2@internal.example/score?key=hunter2"
    }
    settings |= {"sampler": "vllm", "vllm_url": "http://internal.example:8000"}
    found = ModelCard(made(P3OConfig(**settings), adapter=True))
    assert (found.data.base_model, found.data.base_model_relation) == (
        "organization/model",
        "adapter",
    )
    assert found.data.datasets == ["a/data", "b/data"]
    assert "- reward: 1 × organization/judge, 1 × an endpoint" in found.text
    assert "`data.jsonl`, a local one" in found.text
    assert "vllm" in found.text  # the sampler, a choice
    assert not any(
        secret in str(found) for secret in ("hunter2", "internal.example", "home", "secret")
    )
    assert ModelCard(made(P3OConfig(**settings))).data.base_model_relation == "finetune"
    judging = RewardModelConfig(model="/home/me/base", output_dir="o", train_data="t", centring=0.5)
    judge = ModelCard(made(judging, "reward model", classifies=True))
    assert judge.data.pipeline_tag == "text-classification"
    assert judge.data.tags == ["fastp3o", "reward-model", "rlhf"]
    assert "home" not in str(judge)


def test_a_card_has_the_base_and_the_license_through_a_chain_of_runs(workplace):
    """Terms like Gemma's travel with every derivative, of which only the first run knew the model's
    name.
    """
    stated = {
        "base_model": "maker/base",
        "license": "gemma",
        "license_link": "https://maker.example/terms",
    }
    Path("begun").mkdir()
    Path("begun/README.md").write_text(f"---\n{json.dumps(stated)}\n---\nA copy.\n")
    start = "begun"
    for number in range(3):
        card = made(P3OConfig(model=start, prompts="p", reward="r:f", output_dir="o"))
        assert f"- base model: maker/base, by way of `{start}`, a local one" in card
        assert "- its license: gemma https://maker.example/terms" in card
        read = ModelCard(card).data.to_dict()
        assert {name: read[name] for name in stated} == stated
        start = f"run {number}"
        Path(start).mkdir()
        Path(start, "README.md").write_text(card)


@pytest.mark.parametrize(
    "card",
    [
        None,
        "no metadata",
        "---\nbase_model: [\n---\n",
        "---\n- a list\n---\n",
        "---\nbase_model: {a: b}\n---\n",
    ],
)
def test_a_folder_whose_card_says_nothing_has_no_base(workplace, card):
    Path("begun").mkdir()
    if card is not None:
        Path("begun/README.md").write_text(card)
    made_of = ModelCard(made(P3OConfig(model="begun", prompts="p", reward="r:f", output_dir="o")))
    assert made_of.data.base_model is None
    assert "- base model: `begun`, a local one" in made_of.text
    assert "license" not in made_of.text


def test_merged_models_have_no_single_base(workplace):
    Path("begun").mkdir()
    Path("begun/README.md").write_text(
        "---\nbase_model: [maker/one, maker/two]\nlicense: mit\n---\n"
    )
    card = ModelCard(made(P3OConfig(model="begun", prompts="p", reward="r:f", output_dir="o")))
    assert (card.data.base_model, card.data.license) == (None, "mit")


def test_a_card_says_what_was_maximized_and_how_the_model_is_used(workplace):
    settings = {"model": "maker/base", "prompts": "p", "output_dir": "o"}
    several = made(
        P3OConfig(
            reward="checks:right,checks:short,maker/judge", reward_weights="1,0.2,-1", **settings
        )
    )
    assert (
        "- reward: 1 × the Python function `checks:right`, 0.2 × the Python function `checks:short`"
        in several
    )
    assert "-1 × maker/judge" in several
    assert "- reward: the Python function `checks:right`\n" in made(
        P3OConfig(reward="checks:right", **settings)
    )
    assert 'model = AutoModelForCausalLM.from_pretrained("FOLDER OR NAME")' in several
    assert "arXiv:2310.00212" in several
    judging = RewardModelConfig(model="maker/base", output_dir="o", train_data="t")
    assert "from peft import AutoPeftModelForSequenceClassification" in made(
        judging, classifies=True, adapter=True
    )


def test_a_card_names_a_function_s_file_without_its_folder():
    assert public_reward("/home/me/rewards.py:f") == "the Python function `rewards.py:f`"
