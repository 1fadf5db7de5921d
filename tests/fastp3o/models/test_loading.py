"""Checkpoints that are not whole and tokenizers that do not fit are refused by name; every whole family loads."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoModelForSequenceClassification, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fastp3o.models.loading import load_policy, load_reward_model, load_tokenizer, require_same_vocabulary
from fastp3o.models.trainable import add_lora
from tests.fastp3o.models.model_families import FAMILIES, random_model

WEIGHTS = "model.safetensors"


@pytest.fixture
def untied(tmp_path: Path, tiny_model: str) -> Path:
    """A folder with a model whose head is its own, and a tokenizer."""
    folder = tmp_path / "untied"
    config = LlamaConfig.from_pretrained(tiny_model, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def change_weights(folder: Path, *, without: str = "\n", **more: torch.Tensor) -> None:
    weights = {name: weight for name, weight in load_file(folder / WEIGHTS).items() if without not in name}
    save_file(weights | more, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_checkpoint_loads(tmp_path: Path, family: str):
    model = random_model(family)
    model.save_pretrained(tmp_path)
    loaded = load_policy(str(tmp_path)).model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in model.state_dict().items())


@pytest.mark.parametrize(
    ("without", "said"),
    [
        ("lm_head", "it lacks lm_head.weight"),
        ("layers.1.", r"it lacks model.layers.1.input_layernorm.weight, .* and 6 more"),
        ("model.norm", "it lacks model.norm.weight"),
    ],
)
def test_missing_weights_are_named(untied: Path, without: str, said: str):
    change_weights(untied, without=without)
    with pytest.raises(ValueError, match=f"the checkpoint {untied} does not hold the weights of its model: {said}"):
        load_policy(str(untied))


def test_weights_of_another_model_or_size_are_named(untied: Path, tiny_model: str):
    change_weights(untied, **{"model.extra.weight": torch.ones(2), "model.norm.weight": torch.ones(3)})
    with pytest.raises(
        ValueError,
        match=r"it also has model\.extra\.weight; it has in another size model\.norm\.weight \[3\] instead of",
    ):
        load_policy(str(untied))


def test_missing_adapters_are_refused(tmp_path: Path, tiny_model: str):
    policy = load_policy(tiny_model)
    add_lora(policy, rank=2, alpha=4.0, targets="q_proj")
    policy.model.save_pretrained(tmp_path)
    path = tmp_path / "adapter_model.safetensors"
    save_file({name: weight for name, weight in load_file(path).items() if "layers.1." not in name}, path)
    with pytest.raises(ValueError, match=f"cannot load {tmp_path}: .*adapter_model.safetensors lacks "):
        load_policy(str(tmp_path))


def test_weights_that_can_hold_code_are_refused(tmp_path: Path, untied: Path):
    refused = "it has no weights in safetensors, and other formats, which can hold code, are not loaded"
    policy = load_policy(str(untied))
    add_lora(policy, rank=2, alpha=4.0, targets="q_proj")
    policy.model.save_pretrained(tmp_path / "adapters")
    files = {
        tmp_path / "adapters": ("adapter_model.safetensors", "adapter_model.bin"),
        untied: (WEIGHTS, "pytorch_model.bin"),
    }
    for folder, (safe, other) in files.items():
        torch.save(load_file(folder / safe), folder / other)
        (folder / safe).unlink()
        with pytest.raises(ValueError, match=f"cannot load {folder}: {refused}"):
            load_policy(str(folder))
    with pytest.raises(ValueError, match=f"cannot load {untied}: {refused}"):
        load_reward_model(str(untied), new_head=True)


def test_weights_in_several_files_are_loaded(tmp_path: Path, untied: Path):
    whole = load_policy(str(untied)).model
    whole.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    loaded = load_policy(str(tmp_path / "shards")).model.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in whole.state_dict().items())


@pytest.mark.parametrize("length", [0, 5, 5000])
def test_a_file_that_was_cut_off_is_named(untied: Path, length: int):
    path = untied / WEIGHTS
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ValueError, match=f"cannot load {untied}: {path} is not whole"):
        load_policy(str(untied))


def test_folders_that_are_not_there_or_hold_no_model(tmp_path: Path):
    with pytest.raises(ValueError, match=f"cannot load {tmp_path}/nothing: there is no such folder"):
        load_policy(f"{tmp_path}/nothing")
    with pytest.raises(ValueError, match=f"cannot load {tmp_path}: "):
        load_policy(str(tmp_path))


# --- reward models --------------------------------------------------------------------------------------------------


def test_a_language_model_is_no_reward_model_unless_a_head_is_asked_for(untied: Path, tiny_model: str):
    for name in (tiny_model, str(untied)):
        with pytest.raises(ValueError, match=r"it is a language model without a head `score`; train one from it with"):
            load_reward_model(name)
        assert not load_reward_model(name, new_head=True).model.score.weight.any()


def test_a_head_that_was_never_trained_is_refused(tmp_path: Path, tiny_model: str):
    load_reward_model(tiny_model, new_head=True).model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="its head `score` is zero"):
        load_reward_model(str(tmp_path))
    load_reward_model(str(tmp_path), new_head=True)


def test_two_outputs_are_one_too_many(tmp_path: Path, tiny_model: str):
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has 2 outputs; a reward model has one"):
        load_reward_model(str(tmp_path))


@pytest.mark.parametrize("new_head", [False, True])
def test_a_reward_model_must_be_whole_too(tmp_path: Path, tiny_model: str, new_head: bool):
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(tmp_path)
    change_weights(tmp_path, without="model.norm")
    with pytest.raises(ValueError, match=r"it lacks model\.norm\.weight"):
        load_reward_model(str(tmp_path), new_head=new_head)


# --- tokenizers -----------------------------------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_model_is_refused(untied: Path):
    tokenizer = AutoTokenizer.from_pretrained(untied)
    tokenizer.add_tokens([AddedToken("<new>", special=True)])
    tokenizer.save_pretrained(untied)
    with pytest.raises(ValueError, match=r"has tokens that the model's 258 embeddings lack: '<new>'"):
        load_tokenizer(str(untied))


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "llama"])
def test_no_tokenizer_is_made_up(tmp_path: Path, family: str):
    random_model(family).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"cannot load {tmp_path}: it has no tokenizer's files"):
        load_tokenizer(str(tmp_path))


def test_a_reference_has_the_vocabulary_of_the_policy(tmp_path: Path, untied: Path, tiny_model: str):
    own = load_tokenizer(tiny_model)
    require_same_vocabulary(str(untied), tiny_model, own)

    path = untied / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"that of {untied} is not that of {tiny_model}: 2 tokens have .*, a, b"):
        require_same_vocabulary(str(untied), tiny_model, own)

    for file in untied.glob("tokenizer*"):
        file.unlink()
    require_same_vocabulary(str(untied), tiny_model, own)
    shutil.rmtree(untied)
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model, vocab_size=300)).save_pretrained(untied)
    with pytest.raises(ValueError, match="300 tokens instead of 258"):
        require_same_vocabulary(str(untied), tiny_model, own)


def test_weights_that_may_not_be_read_are_said_so(tmp_path, tiny_model, monkeypatch):
    shutil.copytree(tiny_model, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    opened = Path.open

    def forbidden(path, *arguments, **named):  # a mode would not keep root out
        if path == file:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **named)

    def unreadable(*_, **__):
        raise FileNotFoundError(f"No such file or directory: {file}")

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", unreadable)
    with pytest.raises(ValueError, match=f"{file} cannot be read: Permission denied"):
        load_policy(str(tmp_path / "model"))


def test_a_hub_model_out_of_reach_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fastp3o.models.loading.cached_file", lambda *_, **__: None)  # as without a network
    with pytest.raises(
        ValueError, match="cannot load owner/name: it is neither a folder nor in the cache, and the hub"
    ):
        load_tokenizer("owner/name")


def test_a_quantized_base_without_bitsandbytes_says_what_to_install(tiny_model, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"--quantize needs bitsandbytes: pip install '\.\[quantized\]'"):
        load_policy(tiny_model, quantize="4bit")
