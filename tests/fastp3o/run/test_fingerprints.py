import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fastp3o.config import TrainableConfig
from fastp3o.models.loading import load_policy
from fastp3o.models.trainable import add_lora
from fastp3o.run.fingerprints import model_fingerprint, run_fingerprints
from tests.fastp3o.models.model_families import save_adapter

WEIGHTS, ADAPTERS = "model.safetensors", "adapter_model.safetensors"


def of(**names: str) -> dict[str, str]:
    return run_fingerprints(names, {})


def test_one_reward_has_the_name_of_its_option_and_several_have_their_own(workplace, tiny_model):
    function, model = of(reward="rewards_for_tests:vowels"), of(reward=tiny_model)
    assert function.keys() == {"reward function"}
    assert model.keys() == {"reward"}
    both = of(reward=f"rewards_for_tests:vowels,{tiny_model}", model=tiny_model)
    assert both == {
        "reward rewards_for_tests:vowels function": function["reward function"],
        f"reward {tiny_model}": model["reward"],
        "model": model["reward"],
    }
    # An endpoint may move, and must not become a model.
    assert of(reward="http://a/score") == of(reward="http://b:8000/score") != model


@pytest.fixture
def copied(tmp_path: Path, tiny_model: str) -> Path:
    return Path(shutil.copytree(tiny_model, tmp_path / "copied"))


def change_one(path: Path, name: str) -> None:
    weights = load_file(path)
    save_file(weights | {name: weights[name] + 1e-3}, path, metadata={"format": "pt"})


def test_every_tensor_counts_wherever_layers_of_one_size_put_it(tmp_path):
    """A fixed number of places of a file could all lie in tensors that do not train."""
    (tmp_path / "config.json").write_text("{}")
    parts = dict(zip("kqv", torch.zeros(3, 64, 2**15), strict=True))
    weights = {
        f"{layer:02} {name}": part
        for name, layers in parts.items()
        for layer, part in enumerate(layers)
    }
    save_file(weights, tmp_path / WEIGHTS)
    before = model_fingerprint(str(tmp_path))
    parts["q"] += 1e-3
    save_file(weights, tmp_path / WEIGHTS)
    assert model_fingerprint(str(tmp_path)) != before


def test_each_weight_its_dtype_settings_tokenizer_and_code_count_and_other_files_do_not(copied):
    seen = {model_fingerprint(str(copied))}
    names = list(load_file(copied / WEIGHTS))
    for name in names:
        change_one(copied / WEIGHTS, name)
        seen.add(model_fingerprint(str(copied)))
    other_dtype = {
        name: weight.view(torch.int32) for name, weight in load_file(copied / WEIGHTS).items()
    }
    save_file(other_dtype, copied / WEIGHTS)
    seen.add(model_fingerprint(str(copied)))
    files = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "modeling_own.py",
    )
    for name in files:
        with (copied / name).open("a") as file:
            file.write("\n")
        seen.add(model_fingerprint(str(copied)))
    assert len(seen) == len(names) + 2 + len(files)
    (copied / "README.md").touch()
    (copied / "optimizer.safetensors").touch()
    assert model_fingerprint(str(copied)) in seen


def test_adapters_count_and_so_does_the_model_under_them(copied, tmp_path):
    policy, adapters = load_policy(str(copied)), tmp_path / "adapters"
    add_lora(policy, TrainableConfig(lora_rank=2, lora_alpha=4.0, lora_targets="q_proj"))
    save_adapter(policy, adapters)
    seen = {model_fingerprint(str(adapters)), model_fingerprint(str(copied))}
    change_one(adapters / ADAPTERS, next(iter(load_file(adapters / ADAPTERS))))
    seen.add(model_fingerprint(str(adapters)))
    change_one(copied / WEIGHTS, "model.norm.weight")
    seen.add(model_fingerprint(str(adapters)))
    assert len(seen) == 4
