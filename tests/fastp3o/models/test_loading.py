"""Checkpoints that are not whole and tokenizers that do not fit are refused by name; every whole
family loads.
"""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

from fastp3o.config import TrainableConfig
from fastp3o.models.loading import load_policy, load_reward_model
from fastp3o.models.tokenizer import load_tokenizer, require_same_vocabulary
from fastp3o.models.trainable import add_lora
from fastp3o.run.result import load_model
from tests.fastp3o.models.model_families import random_model, save_adapter

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
    weights = {
        name: weight for name, weight in load_file(folder / WEIGHTS).items() if without not in name
    }
    save_file(weights | more, folder / WEIGHTS, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"without": "lm_head"}, "it lacks lm_head.weight"),
        (
            {"model.extra.weight": torch.ones(2), "model.norm.weight": torch.ones(3)},
            r"it also has model\.extra\.weight; it has in another size model\.norm\.weight \[3\] instead of",
        ),
    ],
)
def test_weights_that_are_not_the_models_are_named(untied: Path, changes: dict, said: str):
    change_weights(untied, **changes)
    with pytest.raises(
        ValueError, match=f"the checkpoint {untied} does not hold the weights of its model: {said}"
    ):
        load_policy(str(untied))


def test_the_table_of_others_who_load_is_shown(untied: Path, caplog: pytest.LogCaptureFixture):
    """Of weights that transformers makes up. Ours is an error instead."""
    change_weights(untied, without="lm_head")
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addHandler(caplog.handler)
    try:
        with pytest.raises(ValueError, match="it lacks"):
            load_policy(str(untied))
        assert "LOAD REPORT" not in caplog.text
        LlamaForCausalLM.from_pretrained(untied)
        assert "LOAD REPORT" in caplog.text
    finally:
        logger.removeHandler(caplog.handler)
    with pytest.raises(
        ValueError,
        match=f"{untied} does not hold the weights of its model: it lacks lm_head.weight",
    ):
        load_model(untied)


def test_weights_that_can_hold_code_are_refused(tmp_path: Path, untied: Path):
    policy = load_policy(str(untied))
    add_lora(policy, TrainableConfig(lora_rank=2, lora_alpha=4.0, lora_targets="q_proj"))
    save_adapter(policy, tmp_path / "adapters")
    for folder, name in ((tmp_path / "adapters", "adapter_model"), (untied, "model")):
        safe = folder / f"{name}.safetensors"
        torch.save(
            load_file(safe), folder / {"model": "pytorch_model.bin"}.get(name, f"{name}.bin")
        )
        safe.unlink()
        for load in (load_policy, lambda name: load_reward_model(name, new_head=True)):
            with pytest.raises(
                ValueError, match=f"cannot load {folder}: it has no weights in safetensors"
            ):
                load(str(folder))


def test_a_file_that_was_cut_off_and_a_folder_without_one_are_named(untied: Path):
    path = untied / WEIGHTS
    content = path.read_bytes()
    for length in (0, 5000):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=f"cannot load {untied}: {path} cannot be read"):
            load_policy(str(untied))
    with pytest.raises(ValueError, match=f"cannot load {untied}/nothing: there is no such folder"):
        load_policy(f"{untied}/nothing")
    with pytest.raises(ValueError, match=f"cannot load {untied.parent}: "):
        load_policy(str(untied.parent))


def test_a_language_model_is_no_reward_model_unless_a_head_is_asked_for(
    tmp_path: Path, untied: Path, tiny_model: str
):
    for name in (tiny_model, str(untied)):
        with pytest.raises(ValueError, match="it has no head `score`"):
            load_reward_model(name)
        model = load_reward_model(name, new_head=True).model
        assert not model.score.weight.any()
    model.save_pretrained(tmp_path / "untrained")
    with pytest.raises(ValueError, match="its head `score` is zero"):
        load_reward_model(str(tmp_path / "untrained"))
    load_reward_model(str(tmp_path / "untrained"), new_head=True)


def test_a_reward_model_has_one_output_and_is_whole(tmp_path: Path, tiny_model: str):
    for outputs, said in (
        (2, "has 2 outputs; a reward model has one"),
        (1, r"it lacks model\.norm\.weight"),
    ):
        AutoModelForSequenceClassification.from_pretrained(
            tiny_model, num_labels=outputs
        ).save_pretrained(tmp_path)
        change_weights(tmp_path, without="model.norm")
        for new_head in (False, True):
            with pytest.raises(ValueError, match=said):
                load_reward_model(str(tmp_path), new_head=new_head)


def test_a_tokenizer_fits_the_model_and_has_an_end(untied: Path):
    tokenizer = AutoTokenizer.from_pretrained(untied)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(untied)
    assert load_tokenizer(str(untied)).pad_token == "<end>"
    tokenizer.eos_token = None
    tokenizer.save_pretrained(untied)
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        load_tokenizer(str(untied))
    tokenizer.eos_token = "<end>"
    tokenizer.add_tokens([AddedToken("<new>", special=True)])
    tokenizer.save_pretrained(untied)
    with pytest.raises(
        ValueError, match=r"has tokens that the model's 258 embeddings lack: '<new>'"
    ):
        load_tokenizer(str(untied))


def test_no_tokenizer_is_made_up_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    random_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"cannot load {tmp_path}: no tokenizer files found"):
        load_tokenizer(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    # as without a network
    monkeypatch.setattr("fastp3o.models.checkpoint_files.cached_file", lambda *_, **__: None)
    with pytest.raises(
        ValueError, match="cannot load owner/name: it is neither a folder nor in the cache"
    ):
        load_tokenizer("owner/name")


def test_a_reference_has_the_vocabulary_of_the_policy(untied: Path, tiny_model: str):
    own = load_tokenizer(tiny_model)
    require_same_vocabulary(str(untied), tiny_model, own)
    for file in untied.glob("tokenizer*"):
        file.unlink()
    require_same_vocabulary(str(untied), tiny_model, own)
    shutil.rmtree(untied)
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model, vocab_size=300)).save_pretrained(
        untied
    )
    with pytest.raises(ValueError, match="300 tokens instead of 258"):
        require_same_vocabulary(str(untied), tiny_model, own)
