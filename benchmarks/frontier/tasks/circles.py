"""Raters whose preferences go in circles by a degree that is set, over short responses of the
artificial language.

A response names one of three styles, and goes on with words in that style. It has a utility u, by
the classes of its words, and a place c on a circle, by its style; u, c₀ and c₁ have unit deviation
over the language's responses to a prompt. Raters prefer y to y′ with log-odds SCALE · (√(1 −
degree) (u − u′) + √degree (c₀ c₁′ − c₁ c₀′)): both parts have about the same variance, so the
degree is the share of circles. At 0 raters are Bradley and Terry's; at 1 no score helps: each style
beats one of the others and loses to the third.

Styles carry the circle because a small model's state at the end of a response must say the place:
the words' own classes, which it says little of, were not found (`benchmarks/NOTES.md`).
"""

import re
from pathlib import Path

import numpy as np
import torch

from benchmarks.frontier.tasks import synthetic
from benchmarks.frontier.tasks.language import CLASSES, WORDS, Language, parsed, text_of, words_in

SCALE = 1.5
PLACES = 3
WORDS_OF_RESPONSE = 6  # after its style
LENGTHS = {"max_prompt_tokens": 16, "max_response_tokens": 10}
SIZES = {
    "sft": 8_000,
    "pairs.train": 12_000,
    "pairs.eval": 1_000,
    "prompts.train": 2_000,
    "prompts.eval": 64,
}
SFT = synthetic.SFT | LENGTHS | {"epochs": 2}
REWARD_MODEL = synthetic.REWARD_MODEL | LENGTHS
NAMED = re.compile(r"style(\d)")


class Raters:
    """The preferences of a language's raters. seed: of the language and of what its raters value.
    degree: of circles, within 0 and 1.
    """

    def __init__(self, seed: int, degree: float):
        self.language, self.degree = Language(seed), degree
        rng = np.random.default_rng([seed, 3])
        self.place_of_style = rng.permutation(PLACES)
        prompts = self.language.prompts(2_000, rng)
        first, second = (self.utility(prompts, self.responses(prompts, rng)) for _ in range(2))
        self.mean, self.deviation = first.mean(), (first - second).std() / np.sqrt(2)

    def responses(self, prompts: list[str], rng: np.random.Generator) -> list[str]:
        """The language's own response to each prompt: one of the styles, whatever the prompt's, and
        words in it.
        """
        styles = rng.integers(PLACES, size=len(prompts))
        styled = [
            NAMED.sub(f"style{style}", prompt)
            for prompt, style in zip(prompts, styles, strict=True)
        ]
        words = self.language.continued(styled, WORDS_OF_RESPONSE, rng)
        return [f"style{style} {text_of(said)}" for style, said in zip(styles, words, strict=True)]

    def utility(self, prompts: list[str], responses: list[str]) -> np.ndarray:
        """Σ_classes weight(topic, class) √count(class), [n]."""
        counts = np.array(
            [np.bincount(classes_in(response), minlength=CLASSES) for response in responses]
        )
        weights = self.language.class_weights[[parsed(prompt)[0] for prompt in prompts]]
        return (weights * np.sqrt(counts)).sum(axis=1)

    def features(self, prompts: list[str], responses: list[str]) -> np.ndarray:
        """u, c₀ and c₁ of each response, [n, 3]. One that names no style first is in the middle of
        the circle.
        """
        angles = 2 * np.pi * np.arange(PLACES) / PLACES
        on_circle = (
            np.sqrt(2) * np.column_stack([np.cos(angles), np.sin(angles)])[self.place_of_style]
        )
        places = np.zeros((len(responses), 2))
        for number, response in enumerate(responses):
            named = NAMED.match(response)
            if named and int(named[1]) < PLACES:
                places[number] = on_circle[int(named[1])]
        u = (self.utility(prompts, responses) - self.mean) / self.deviation
        return np.column_stack([u, places])

    def preferred(self, firsts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
        """P(the first is preferred) by the features of both, [..., 3], [..., 3] -> [...]."""
        lead = firsts[..., 0] - seconds[..., 0]
        circle = firsts[..., 1] * seconds[..., 2] - firsts[..., 2] * seconds[..., 1]
        return 1 / (
            1 + np.exp(-SCALE * (np.sqrt(1 - self.degree) * lead + np.sqrt(self.degree) * circle))
        )


def classes_in(response: str) -> np.ndarray:
    """The classes of its words, without topics and styles, which have none."""
    words = np.array(words_in(response), dtype=int)
    return words[words >= 0] * CLASSES // WORDS


def make_policy(folder: Path, seed: int) -> None:
    """Writes demonstrations and prompts and, in policy/, a model that imitates the language; no
    prompt comes twice.
    """
    raters, rng = Raters(seed, 0.0), np.random.default_rng([seed, 4])
    parts = synthetic.divided(raters.language.prompts(sum(SIZES.values()), rng), SIZES)
    synthetic.make_imitator(
        folder, seed, parts, lambda prompts: raters.responses(prompts, rng), SFT
    )


def make_pairs(folder: Path, start: Path, seed: int, degree: float) -> float:
    """Writes pairs.train.jsonl and pairs.eval.jsonl, two of the language's responses to each prompt
    of the start with a rater's verdict; returns the share of held-out verdicts that agree with the
    truer one.
    """
    raters, rng = Raters(seed, degree), np.random.default_rng([seed, 5])
    folder.mkdir(parents=True, exist_ok=True)
    for part in ("pairs.train", "pairs.eval"):
        prompts = [record["prompt"] for record in synthetic.read_jsonl(start / f"{part}.jsonl")]
        sides = [raters.responses(prompts, rng) for _ in range(2)]
        preferred = raters.preferred(*(raters.features(prompts, side) for side in sides))
        first_wins = rng.random(len(prompts)) < preferred
        records = [
            {"prompt": prompt, "chosen": a if wins else b, "rejected": b if wins else a}
            for prompt, a, b, wins in zip(prompts, *sides, first_wins, strict=True)
            if a != b
        ]
        synthetic.write_jsonl(folder / f"{part}.jsonl", records)
    return float(np.mean(first_wins == (preferred > 0.5)))


def win_rate(raters: Raters, ours: np.ndarray, theirs: np.ndarray) -> float:
    """How often a response of ours is preferred to one of theirs, by features [P, n, 3] and [P, m,
    3].
    """
    return float(raters.preferred(ours[:, :, None], theirs[:, None]).mean())


def worst_case(raters: Raters, ours: np.ndarray, replies: np.ndarray) -> float:
    """How often our responses are preferred to the best of all replies to a prompt: the one that
    beats most of a first half of ours, measured on the second half. A policy that nothing beats has
    ½. Features [P, n, 3] and [P, m, 3].
    """
    first, second = np.split(ours, 2, axis=1)
    beaten = raters.preferred(replies[:, :, None], first[:, None]).mean(axis=2)
    best = np.take_along_axis(
        replies, torch.from_numpy(beaten).argmax(1).numpy()[:, None, None], axis=1
    )
    return win_rate(raters, second, best)


def largest_style(features: np.ndarray) -> float:
    """The share of the style that a policy names most, a mean over prompts: 1 if it always names
    the same to a prompt. Features [P, n, 3].
    """
    counted = [
        np.unique(of_prompt[:, 1:].round(6), axis=0, return_counts=True)[1].max()
        for of_prompt in features
    ]
    return float(np.mean(counted)) / features.shape[1]
