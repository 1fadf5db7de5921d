"""Responses of the artificial language whose lengths differ by a factor of 4, with a reward that favors
neither, so that training keeps both.

Half of the language's responses have 5 to 7 words, half 23 to 27, by chance and whatever the prompt.
What words are worth is Σ_classes weight(topic, class) √share(class) less the share of repeated words;
the utility is that in deviations of the language's responses of the same kind, short or long. The
reward is the utility less its mean over all responses of the kind in the same round, and BALANCE times
what the kind's share lacks of a half: a response is graded among those of its length, and the rarer
length pays. With the utility alone, or without the balance, policies are short within ten updates.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.language import CLASSES, WORDS, Language, parsed, text_of, words_in
from fastp3o.rollouts.groups import Group, texts

SHORT, LONG = (5, 7), (23, 27)  # words, least and most
BETWEEN = 15
BALANCE = 3.0
LENGTHS = {"max_prompt_tokens": 16, "max_response_tokens": 32}
SIZES = {"sft": 8_000, "prompts.train": 2_000, "prompts.eval": 128}
SFT: dict[str, Any] = synthetic.SFT | LENGTHS | {"epochs": 2}
NOTHING_SAID = -3.0  # what an empty response is worth, less than nearly all others


class TwoLengths:
    """A language's responses of two lengths, and their utility. seed: of the language."""

    def __init__(self, seed: int):
        self.language = Language(seed)
        rng = np.random.default_rng([seed, 6])
        prompts = self.language.prompts(4_000, rng)
        said = self.responses(prompts, rng)
        kinds, worths = are_long(said), self.worths(prompts, said)
        # of short and of long responses
        self.means = np.array([worths[kinds == kind].mean() for kind in (False, True)])
        self.deviations = np.array([worths[kinds == kind].std() for kind in (False, True)])

    def responses(self, prompts: list[str], rng: np.random.Generator) -> list[str]:
        """One response to each prompt, short or long."""
        bounds = np.array([SHORT, LONG])[rng.integers(2, size=len(prompts))]
        lengths = rng.integers(bounds[:, 0], bounds[:, 1] + 1)
        words = self.language.continued(prompts, LONG[1], rng)
        return [text_of(drawn[:length]) for drawn, length in zip(words, lengths, strict=True)]

    def worths(self, prompts: list[str], responses: list[str]) -> np.ndarray:
        weights = (self.language.class_weights[parsed(prompt)[0]] for prompt in prompts)
        said = map(words_in, responses)
        return np.array([worth(*one) for one in zip(weights, said, strict=True)])

    def utility(self, prompts: list[str], responses: list[str]) -> np.ndarray:
        """In deviations of the language's responses of its kind, 0 at their mean, [n]."""
        kinds = are_long(responses).astype(int)
        return (self.worths(prompts, responses) - self.means[kinds]) / self.deviations[kinds]

    def gold(self, groups: list[Group]) -> Tensor:
        """The utility, [P, K]."""
        return as_groups(self.utility(*texts(groups)), groups)

    def reward(self, groups: list[Group]) -> Tensor:
        """The utility among those of the same kind, and what balances the kinds, [P, K]."""
        prompts, responses = texts(groups)
        return as_groups(graded(self.utility(prompts, responses), are_long(responses)), groups)


def graded(utilities: np.ndarray, long: np.ndarray) -> np.ndarray:
    rewards = np.empty_like(utilities)
    for kind in (long, ~long):
        if kind.any():
            rewards[kind] = utilities[kind] - utilities[kind].mean() + BALANCE * (0.5 - kind.mean())
    return rewards


def are_long(responses: list[str]) -> np.ndarray:
    return np.array([len(response.split()) > BETWEEN for response in responses])


def as_groups(values: np.ndarray, groups: list[Group]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).view(len(groups), -1)


def worth(weights: np.ndarray, words: list[int]) -> float:
    """Of words in a topic with these weights of classes. Topics and styles, which are below 0, are
    words of no class.
    """
    if not words:
        return NOTHING_SAID
    classes = [word * CLASSES // WORDS for word in words if word >= 0]
    shares = np.bincount(classes, minlength=CLASSES) / len(words)
    return float(weights @ np.sqrt(shares)) - (len(words) - len(set(words))) / len(words)


def make(folder: Path, seed: int) -> None:
    """Writes prompts and, in policy/, a model that imitates the language; no prompt occurs twice."""
    task, rng = TwoLengths(seed), np.random.default_rng([seed, 7])
    parts = synthetic.divided(task.language.prompts(sum(SIZES.values()), rng), SIZES)
    synthetic.make_imitator(folder, seed, parts, lambda prompts: task.responses(prompts, rng), SFT)
