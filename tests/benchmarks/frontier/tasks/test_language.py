"""The synthetic task: a language's statistics, the parts of its utility, offsets of the reward, data that loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.frontier import synthetic
from benchmarks.frontier.language import (
    FREE_LENGTH,
    PENALTY_PER_REPEAT,
    PENALTY_PER_WORD,
    VOCABULARY,
    Language,
    parsed,
    words_in,
)
from benchmarks.frontier.offsets import GRID, OFFSETS, OffsetReward, learnable, on_grid, unlearnable
from fastp3o.data import load_demonstrations, load_preferences, load_prompts
from fastp3o.models.loading import load_policy, load_tokenizer
from fastp3o.rollouts.transformers_sampler import Rollouts

ROOT = Path(__file__).parents[2]
PROMPT = "topic3 style1 w017 w045 w092 w003"
REAL_PROMPTS = ["", "word", "MODULE: torch.nn\n\nTL;DR:", "1 2", "ß é", "\N{GRINNING FACE} \N{GRINNING FACE}"]


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(0)


@pytest.fixture(scope="module")
def prompts(language: Language) -> list[str]:
    return language.prompts(3000, np.random.default_rng(1))


@pytest.fixture(scope="module")
def responses(language: Language, prompts: list[str]) -> list[str]:
    return language.responses(prompts, np.random.default_rng(2))


# --- the language ---------------------------------------------------------------------------------------------------


def test_prompts_are_distinct_and_cover_topics_and_styles(prompts):
    assert len(set(prompts)) == len(prompts)
    kinds = {parsed(prompt)[:2] for prompt in prompts}
    assert kinds == {(topic, style) for topic in range(10) for style in range(4)}


@pytest.mark.parametrize("seed", range(3))
def test_a_word_has_three_and_a_half_nats(seed):
    language = Language(seed)
    prompts = language.prompts(1000, np.random.default_rng(1))
    entropies, surprises = [], []
    for prompt, response in zip(prompts, language.responses(prompts, np.random.default_rng(2)), strict=True):
        topic, style, word = parsed(prompt)
        words = words_in(response)
        probabilities = language.probabilities[topic, style, [word, *words[:-1]]]
        entropies += list(-(probabilities * np.log(probabilities)).sum(axis=1))
        surprises += list(-np.log(probabilities[range(len(words)), words]))
    assert np.mean(entropies) == pytest.approx(3.5, abs=0.1)
    # What is sampled follows the tables.
    assert np.mean(surprises) == pytest.approx(np.mean(entropies), abs=0.03)


def test_a_tenth_ends_at_each_word_from_the_tenth(responses):
    lengths = np.array([len(response.split(" ")) for response in responses])
    assert lengths.min() == 10
    assert lengths.max() == 31
    for length in (10, 15, 20):
        assert (lengths == length).sum() / (lengths >= length).sum() == pytest.approx(0.1, abs=0.03)


def test_equal_seeds_give_equal_texts(language, prompts, responses):
    again = Language(0)
    assert again.prompts(3000, np.random.default_rng(1)) == prompts
    assert again.responses(prompts, np.random.default_rng(2)) == responses
    assert again.utility(prompts, responses) == language.utility(prompts, responses)
    assert Language(1).responses(prompts, np.random.default_rng(2)) != responses


def test_what_is_no_prompt_is_refused(language):
    for wrong in ("", "topic3 style4 w001", "topic3 style1", "topic3 style1 w120", PROMPT + " "):
        with pytest.raises(ValueError, match=r"expected a prompt such as 'topic3 .*, got"):
            language.responses([wrong], np.random.default_rng(0))


# --- its utility ----------------------------------------------------------------------------------------------------


def utility(language: Language, response: str) -> float:
    """Before it is scaled."""
    return language.utility([PROMPT], [response])[0] * language.scale


def test_a_deviation_within_prompts_is_one(language, prompts, responses):
    others = language.responses(prompts, np.random.default_rng(3))
    difference = np.subtract(language.utility(prompts, responses), language.utility(prompts, others))
    assert difference.std() / 2**0.5 == pytest.approx(1.0, abs=0.05)


def test_nothing_is_worth_nothing(language):
    assert language.utility([PROMPT], [""]) == [0.0]


def test_words_of_a_class_count_with_the_root_of_their_number(language):
    weights = language.class_weights[3]
    assert utility(language, "w000") == pytest.approx(weights[0])
    assert utility(language, "w000 w001 w009 w005") == pytest.approx(2 * weights[0])
    assert utility(language, "w000 w119 w118") == pytest.approx(weights[0] + 2**0.5 * weights[11])
    assert language.utility(["topic4 style1 w003"], ["w119"]) != language.utility([PROMPT], ["w119"])


def test_repeats_and_long_responses_cost(language):
    assert utility(language, "w007 w007") == pytest.approx(utility(language, "w007 w008") - PENALTY_PER_REPEAT)
    words = [f"w{word:03}" for word in range(20)]
    short, long = " ".join(words[:FREE_LENGTH]), " ".join(words)
    counted = language.class_weights[3, 0] * 10**0.5 + language.class_weights[3, 1] * np.array([4, 10]) ** 0.5
    penalties = [0, (20 - FREE_LENGTH) * PENALTY_PER_WORD]
    assert [utility(language, response) for response in (short, long)] == pytest.approx(counted - penalties)


def test_words_of_prompts_are_known_and_without_a_class(language):
    assert utility(language, "topic3 style1 w007") == pytest.approx(utility(language, "w007"))


def test_an_unknown_word_is_refused_with_its_response(language):
    with pytest.raises(ValueError, match="expected words of the language, got 'w120' in the response 'w001 w120'"):
        language.utility([PROMPT], ["w001 w120"])


@pytest.mark.parametrize("topic", range(10))
def test_the_best_response_is_deviations_better_and_ends_by_itself(language, topic):
    """Words of the classes that gain most, one after the other."""
    counts, words, utilities = np.zeros(12, dtype=int), [], []
    for _ in range(31):
        gains = language.class_weights[topic] * (np.sqrt(counts + 1) - np.sqrt(counts))
        best = int(np.where(counts < 10, gains, -np.inf).argmax())
        words.append(f"w{10 * best + counts[best]:03}")
        counts[best] += 1
        utilities.append(language.utility([f"topic{topic} style0 w000"], [" ".join(words)])[0])
    assert max(utilities) > 2.5
    assert FREE_LENGTH <= np.argmax(utilities) + 1 < 31


# --- offsets --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [learnable, unlearnable])
def test_offsets_have_mean_zero_and_deviation_one(offset, prompts):
    values = [offset(prompt) for prompt in prompts]
    assert np.mean(values) == pytest.approx(0.0, abs=0.06)
    assert np.std(values) == pytest.approx(1.0, abs=0.06)


def test_the_learnable_offset_is_of_topic_and_style(prompts):
    values = {parsed(prompt)[:2]: learnable(prompt) for prompt in prompts}
    assert all(learnable(prompt) == values[parsed(prompt)[:2]] for prompt in prompts)
    assert len(set(values.values())) == 40


@pytest.mark.parametrize("offset", [learnable, unlearnable])
def test_any_text_has_an_offset(offset):
    assert all(abs(offset(prompt)) < 10 for prompt in REAL_PROMPTS)


def test_offsets_are_the_same_in_every_process():
    prompts = [PROMPT, *REAL_PROMPTS]
    code = "from benchmarks.frontier.offsets import learnable, unlearnable; "
    output = subprocess.run(
        [sys.executable, "-c", f"{code}print([[learnable(text), unlearnable(text)] for text in {prompts!a}])"],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7"},
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert json.loads(output) == [[learnable(text), unlearnable(text)] for text in prompts]


VALUES = st.floats(-1000, 1000)


@given(VALUES, VALUES, VALUES)
def test_on_the_grid_an_offset_leaves_the_bits_of_differences(first, second, offset):
    first, second, offset = (torch.tensor(on_grid(value), dtype=torch.float32) for value in (first, second, offset))
    assert (first + offset) - (second + offset) == first - second


@given(VALUES)
def test_the_grid_is_near(value):
    assert abs(on_grid(value) - value) <= GRID / 2
    assert (on_grid(value) / GRID).is_integer()


@pytest.mark.parametrize("name", OFFSETS)
def test_a_reward_is_standardised_and_shifted(name):
    rollouts = Rollouts([[1]] * 2, [[2]] * 2, [PROMPT, "another"], ["w001", "w002"], [True] * 2)
    reward = OffsetReward(lambda rollouts: [5.0, 1.0], mean=2.0, std=4.0, offset=OFFSETS[name], sd=10.0)
    shifts = [0.0 if OFFSETS[name] is None else on_grid(10 * OFFSETS[name](prompt)) for prompt in rollouts.prompts]
    assert reward(rollouts) == [0.75 + shifts[0], -0.25 + shifts[1]]


# --- data -----------------------------------------------------------------------------------------------------------

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


def rows_of(folder: Path, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def test_the_same_seed_writes_the_same_bytes(folder, tmp_path):
    again = data_in(tmp_path / "again")
    files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert len(files) >= 8
    assert all((folder / file).read_bytes() == (again / file).read_bytes() for file in files)


def test_no_prompt_occurs_twice(folder):
    prompts = [row["prompt"] for path in folder.glob("*.jsonl") for row in rows_of(folder, path.stem)]
    assert len(set(prompts)) == len(prompts) == sum(SIZES.values())


def test_the_loaders_cut_nothing(folder):
    tokenizer = load_tokenizer(str(folder / "init"))
    limits = {name: synthetic.LIMITS[name] for name in ("max_prompt_tokens", "max_response_tokens")}
    _, demonstrations = load_demonstrations(str(folder / "sft.jsonl"), tokenizer, **limits)
    pairs, preferences = load_preferences(str(folder / "preferences.train.jsonl"), tokenizer, **limits)
    prompts, report = load_prompts(str(folder / "prompts.train.jsonl"), tokenizer, max_prompt_tokens=16)
    assert str(demonstrations) == "200 rows, 0 prompts and 0 responses truncated, 0 rows skipped"
    assert str(preferences) == "2000 rows, 0 prompts and 0 responses truncated, 0 rows skipped"
    assert str(report) == "100 rows, 0 prompts and 0 responses truncated, 0 rows skipped"
    assert prompts["prompt"] == [row["prompt"] for row in rows_of(folder, "prompts.train")]
    chosen = [tokenizer.decode(ids, skip_special_tokens=True) for ids in pairs["chosen_ids"]]
    assert chosen == [row["chosen"] for row in rows_of(folder, "preferences.train")]


def test_every_word_has_a_token_and_comes_back(folder):
    tokenizer = load_tokenizer(str(folder / "init"))
    text = " ".join(VOCABULARY)
    ids = tokenizer(text).input_ids
    assert sorted([tokenizer.eos_token_id, tokenizer.pad_token_id, *ids]) == list(range(len(tokenizer)))
    assert tokenizer.decode(ids) == text


def test_who_knows_the_utility_agrees_with_three_labels_in_four(folder, language):
    rows = rows_of(folder, "preferences.train")
    prompts, chosen, rejected = ([row[name] for row in rows] for name in ("prompt", "chosen", "rejected"))
    agrees = np.greater(language.utility(prompts, chosen), language.utility(prompts, rejected))
    assert agrees.mean() == pytest.approx(0.77, abs=0.03)


def test_the_model_is_tiny(folder):
    assert load_policy(str(folder / "init")).model.num_parameters() == pytest.approx(1e5, rel=0.01)
