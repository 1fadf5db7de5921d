"""Rewards of tasks whose answers are known, for `--reward fastp3o.rewards.verifiable:exact_match`."""

import re
from collections import Counter
from collections.abc import Sequence


def exact_match(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[object]) -> list[float]:
    """1 if the response is the answer, a text or a number, except for white space around it; else 0."""
    pairs = zip(responses, answer, strict=True)
    return [float(response.strip() == str(expected).strip()) for response, expected in pairs]


def word_overlap(prompts: Sequence[str], responses: Sequence[str], label: Sequence[str]) -> list[float]:
    """ROUGE-1 (Lin 2004): the harmonic mean of the share of the response's words that are the label's, and the share of
    the label's that are the response's, each as often as it occurs. From 0 to 1; case does not count.
    """
    return [overlap(words(response), words(true)) for response, true in zip(responses, label, strict=True)]


def words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def overlap(one: Counter[str], other: Counter[str]) -> float:
    total = one.total() + other.total()
    return 2 * (one & other).total() / total if total else 0.0
