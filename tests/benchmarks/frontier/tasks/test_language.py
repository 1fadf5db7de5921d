"""The language's statistics, and the parts of its utility."""

import numpy as np
import pytest

from benchmarks.frontier.tasks.language import (
    FREE_LENGTH,
    PENALTY_PER_REPEAT,
    PENALTY_PER_WORD,
    Language,
    parsed,
    words_in,
)

PROMPT = "topic3 style1 w017 w045 w092 w003"


@pytest.fixture(scope="module")
def language() -> Language:
    return Language(0)


@pytest.fixture(scope="module")
def prompts(language: Language) -> list[str]:
    return language.prompts(3000, np.random.default_rng(1))


@pytest.fixture(scope="module")
def responses(language: Language, prompts: list[str]) -> list[str]:
    return language.responses(prompts, np.random.default_rng(2))


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
