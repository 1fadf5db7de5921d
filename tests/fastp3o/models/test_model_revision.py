"""A model's repository at another revision than its main branch, in the hub's cache."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import fastp3o
from fastp3o import DPOConfig, SFTConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from tests.fastp3o.runs import assert_equal, metrics, weights

COMMITS = {"main": "1" * 40, "older": "2" * 40}
SETTINGS = {"model": "owner/base", "report_to": "none", "batch_size": 4, "precision": "fp32", "lora_rank": 2}


@pytest.fixture
def older(tiny_model, workplace, tmp_path, monkeypatch) -> Path:
    """The folder of the revision `older` of `owner/base`: another model than main's, and another tokenizer."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--owner--base"
    (repository / "refs").mkdir(parents=True)
    for branch, commit in COMMITS.items():
        shutil.copytree(tiny_model, repository / "snapshots" / commit)
        (repository / "refs" / branch).write_text(commit)
    folder = repository / "snapshots" / COMMITS["older"]
    moved = {name: weight * 1.5 for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "chat_template.jinja").write_text("older")
    generation = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(generation | {"max_length": 77}))
    return folder


def test_a_run_begins_with_the_revision_and_says_so(older):
    data = {"train_data": "sft.jsonl", "eval_data": "sft.jsonl"}
    config = SFTConfig(**SETTINGS, **data, model_revision="older", output_dir="run")
    fastp3o.train(config)
    fastp3o.train(SFTConfig(**(SETTINGS | {"model": str(older)}), **data, output_dir="folder"))
    fastp3o.train(replace(config, model_revision=None, model="owner/base", output_dir="main"))
    assert metrics("run") == metrics("folder") != metrics("main")
    assert_equal(weights("run"), weights("folder"))
    assert Path("run/model/chat_template.jinja").read_text() == "older"
    assert json.loads(Path("run/model/generation_config.json").read_text())["max_length"] == 77
    adapter = json.loads(Path("run/adapter/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("owner/base", "older")
    assert "- its revision: older" in Path("run/model/README.md").read_text()
    # The adapter's base has its revision too, and a run goes on with its own alone.
    again, merged = (load_policy(f"run/{name}").model.state_dict() for name in ("adapter", "model"))
    torch.testing.assert_close(again, merged)
    fastp3o.train(replace(config, resume=True))
    with pytest.raises(UserError, match="model_revision"):
        fastp3o.train(replace(config, resume=True, model_revision="main"))


def test_the_reference_has_the_revision(older):
    pairs = {"train_data": "preferences.jsonl", "eval_data": "preferences.jsonl"}
    fastp3o.train(DPOConfig(**(SETTINGS | {"lora_rank": 0}), **pairs, model_revision="2" * 40, output_dir="run"))
    assert metrics("run", "eval.jsonl")[0]["k2"] < 1e-9


def test_it_is_refused_where_it_says_nothing(older, tiny_model):
    settings = SETTINGS | {"model_revision": "older", "train_data": "sft.jsonl", "output_dir": "run"}
    with pytest.raises(UserError, match=f"--model_revision is of a hub's repository, and --model {tiny_model} is none"):
        SFTConfig(**(settings | {"model": tiny_model}))
    with pytest.raises(UserError, match=f"--model_revision is of a hub's repository, and --model {tiny_model} is none"):
        fastp3o.train(SFTConfig(**settings), model=AutoModelForCausalLM.from_pretrained(tiny_model))
    with pytest.raises(UserError, match="cannot load owner/base"):
        fastp3o.train(SFTConfig(**(settings | {"model_revision": "no-such"})))
