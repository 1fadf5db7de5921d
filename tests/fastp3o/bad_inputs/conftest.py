"""The folder where command lines of `working.py` run, with models that are whole and others with
one thing wrong.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from fastp3o.data import encoding

NO_ROPE = {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}}
ADAPTER = {"peft_type": "LORA", "r": 2}


def with_letters_exchanged(tokenizer: dict) -> dict:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    return tokenizer


# By the folders' names: a file of JSON, and what becomes of it.
CHANGED: dict[str, tuple[str, Callable]] = {
    "permuted": ("tokenizer.json", with_letters_exchanged),
    "rope": ("config.json", lambda config: config | NO_ROPE),
    "list_config": ("config.json", lambda config: [1]),
    "adapter_of_nothing": ("adapter_config.json", lambda config: ADAPTER),
    "adapter_of_no_folder": (
        "adapter_config.json",
        lambda _: ADAPTER | {"base_model_name_or_path": "runs/no/model"},
    ),
    "reward_short": ("config.json", lambda config: config | {"max_position_embeddings": 16}),
}
# By the folders' names: a weight, and what becomes of it.
CHANGED_WEIGHTS: dict[str, tuple[str, Callable]] = {
    "int8": ("model.norm.weight", lambda weight: weight.to(torch.int8)),
    "not_finite": (
        "model.embed_tokens.weight",
        lambda weight: weight.index_fill(0, torch.tensor([-1]), torch.nan),
    ),
}
# By the folders' names: a file that ends in its middle.
CUT = {f"cut_{Path(name).stem}": name for name in ("config.json", "tokenizer.json")}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("whole", *CHANGED, *CHANGED_WEIGHTS, *CUT):
        shutil.copytree(tiny_model, folder / name)
    reward_model = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    reward_model.save_pretrained(folder / "reward_short")
    for name, (file, change) in CHANGED.items():
        path = folder / name / file
        path.write_text(json.dumps(change(json.loads(path.read_text()) if path.exists() else None)))
    for name, (changed, change) in CHANGED_WEIGHTS.items():
        path = folder / name / "model.safetensors"
        weights = load_file(path)
        save_file(weights | {changed: change(weights[changed])}, path, metadata={"format": "pt"})
    for name, file in CUT.items():
        path = folder / name / file
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (folder / "gguf").mkdir()
    (folder / "gguf/weights.gguf").write_bytes(b"GGUF")
    return folder


@pytest.fixture
def place(workplace: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workplace / "models").symlink_to(models)
    monkeypatch.setattr(encoding, "TIME_LIMIT", 0.5)
    monkeypatch.delitem(sys.modules, "bad_rewards", raising=False)
    return workplace
