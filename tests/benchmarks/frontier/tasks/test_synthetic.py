"""Data of a language: that the loaders take it, and that labels follow the utility."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.language import VOCABULARY, Language
from fastp3o.data.loading import load_demonstrations, load_preferences, load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(0)


SIZES = {"DEMONSTRATIONS": 200, "TRAIN_PAIRS": 2000, "EVAL_PAIRS": 50, "TRAIN_PROMPTS": 100, "EVAL_PROMPTS": 20}


def data_in(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        for name, size in SIZES.items():
            patch.setattr(synthetic, name, size)
        synthetic.make_data(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data_in(tmp_path_factory.mktemp("data") / "language")


def read_records(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_seed_writes_the_same_bytes(folder, tmp_path):
    again = data_in(tmp_path / "again")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) >= 8
    assert all((folder / file).read_bytes() == (again / file).read_bytes() for file in files)


def test_no_prompt_occurs_twice(folder):
    prompts = [record["prompt"] for path in folder.glob("*.jsonl") for record in read_records(folder, path.stem)]
    assert len(set(prompts)) == len(prompts) == sum(SIZES.values())


def test_the_loaders_cut_nothing(folder):
    tokenizer = load_tokenizer(str(folder / "init"))
    limits = {name: synthetic.LIMITS[name] for name in ("max_prompt_tokens", "max_response_tokens")}
    _, demonstrations = load_demonstrations(str(folder / "sft.jsonl"), tokenizer, **limits)
    pairs, preferences = load_preferences(str(folder / "preferences.train.jsonl"), tokenizer, **limits)
    prompts, report = load_prompts(str(folder / "prompts.train.jsonl"), tokenizer, max_prompt_tokens=16)
    assert str(demonstrations) == "200 examples, 0 prompts and 0 responses truncated, 0 records skipped"
    assert str(preferences) == "2000 examples, 0 prompts and 0 responses truncated, 0 records skipped"
    assert str(report) == "100 examples, 0 prompts and 0 responses truncated, 0 records skipped"
    assert prompts["prompt"] == [record["prompt"] for record in read_records(folder, "prompts.train")]
    chosen = [tokenizer.decode(ids, skip_special_tokens=True) for ids in pairs["chosen_ids"]]
    assert chosen == [record["chosen"] for record in read_records(folder, "preferences.train")]


def test_every_word_has_a_token_and_comes_back(folder):
    tokenizer = load_tokenizer(str(folder / "init"))
    text = " ".join(VOCABULARY)
    ids = tokenizer(text).input_ids
    assert sorted([tokenizer.eos_token_id, tokenizer.pad_token_id, *ids]) == list(range(len(tokenizer)))
    assert tokenizer.decode(ids) == text


def test_who_knows_the_utility_agrees_with_three_labels_in_four(folder, language):
    records = read_records(folder, "preferences.train")
    prompts, chosen, rejected = ([record[name] for record in records] for name in ("prompt", "chosen", "rejected"))
    agrees = np.greater(language.utility(prompts, chosen), language.utility(prompts, rejected))
    assert agrees.mean() == pytest.approx(0.77, abs=0.03)


def test_the_model_is_tiny(folder):
    assert load_policy(str(folder / "init")).model.num_parameters() == pytest.approx(1e5, rel=0.01)
