"""Folders of models, each with one thing wrong; `whole` and `chat` are as they should be."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

CHAT = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def make_models(folder: Path, tiny_model: str) -> None:
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model)).save_pretrained(folder / "whole")
    reward_model = AutoModelForSequenceClassification.from_pretrained(folder / "whole", num_labels=1)
    reward_model.save_pretrained(folder / "reward_short")
    for name in ("whole", "reward_short"):
        tokenizer.save_pretrained(folder / name)
    change_json(folder / "reward_short", "config.json", lambda config: config | {"max_position_embeddings": 16})
    for name, (file, change) in CHANGED.items():
        shutil.copytree(folder / "whole", folder / name)
        change_json(folder / name, file, change)
    for name, (weight, change) in CHANGED_WEIGHTS.items():
        shutil.copytree(folder / "whole", folder / name)
        weights = load_file(folder / name / "model.safetensors")
        weights[weight] = change(weights[weight])
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})


def change_json(folder: Path, file: str, change: Callable) -> None:
    path = folder / file
    path.write_text(json.dumps(change(json.loads(path.read_text()) if path.exists() else None)))


def with_letters_exchanged(tokenizer: dict) -> dict:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return tokenizer


NO_ROPE = {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}
ADAPTER = {"peft_type": "LORA", "r": 2}
CHANGED = {
    "chat": ("tokenizer_config.json", lambda config: config | {"chat_template": CHAT}),
    "no_end": ("tokenizer_config.json", lambda config: config | {"eos_token": None}),
    "permuted": ("tokenizer.json", with_letters_exchanged),
    "rope": ("config.json", lambda config: config | NO_ROPE),
    "list_config": ("config.json", lambda config: [1]),
    "adapter_of_nothing": ("adapter_config.json", lambda config: ADAPTER),
    "adapter_of_no_folder": ("adapter_config.json", lambda _: ADAPTER | {"base_model_name_or_path": "runs/no/model"}),
}
CHANGED_WEIGHTS = {
    "int8": ("model.norm.weight", lambda weight: torch.ones(32, dtype=torch.int8)),
    "not_finite_where_unused": ("model.embed_tokens.weight", lambda weight: weight.index_fill(0, UNUSED, torch.nan)),
}
UNUSED = torch.tensor([-1])
