"""Data of a language: that the loaders take it, and that labels follow the utility."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.language import VOCABULARY, Language, LongPrompts
from fastp3o.data import load_demonstrations, load_preferences, load_prompts
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


@pytest.mark.parametrize("parameters", synthetic.SHAPES)
def test_models_have_the_sizes_that_they_are_named_by(parameters):
    model = synthetic.make_model(synthetic.make_tokenizer(), 0, synthetic.SHAPES[parameters])
    assert model.num_parameters() == pytest.approx(parameters, rel=0.04)


def test_further_labels_are_turned_until_so_many_are_wrong(folder):
    records = read_records(folder, "preferences.train")
    turned = synthetic.with_wrong_labels(records, 0.35, np.random.default_rng(0))
    other = [
        one["chosen"] == two["rejected"] and one["rejected"] == two["chosen"]
        for one, two in zip(records, turned, strict=True)
    ]
    assert all(one == two for one, two, is_other in zip(records, turned, other, strict=True) if not is_other)
    # Of those that were right, and of those that were wrong, equally many are turned.
    assert np.mean(other) == pytest.approx((0.35 - 0.05) / (1 - 2 * 0.05), abs=0.03)


def test_long_prompts_are_cut_by_no_loader(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        for name in SIZES:
            patch.setattr(synthetic, name, 20)
        synthetic.make_data(tmp_path, 0, LongPrompts)
    limits = {name: synthetic.LONG_LIMITS[name] for name in ("max_prompt_tokens", "max_response_tokens")}
    _, report = load_demonstrations(str(tmp_path / "sft.jsonl"), load_tokenizer(str(tmp_path / "init")), **limits)
    assert str(report) == "20 examples, 0 prompts and 0 responses truncated, 0 records skipped"
    load_policy(str(tmp_path / "init")).check_reach(sum(limits.values()))
