"""Chooses responses to a prompt by their rewards, and makes records of them.

A record of one response is a demonstration (SFT), one of two a preference; both are layouts of data/README.md.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import exp
from typing import Any, NamedTuple

import numpy as np

from fastp3o.config import Flags, option
from fastp3o.data.layouts import Message
from fastp3o.errors import UserError
from fastp3o.stages.generate.samples import Samples

Record = dict[str, Any]
Prompt = str | list[Message]

# Choices of --keep, and the flags that each takes.
KEEP_FLAGS: dict[str, tuple[str, ...]] = {
    "all": (),
    "best": (),
    "rest": ("threshold",),
    "rejection_sampling": ("beta", "accept"),
    "rso": ("beta", "accept"),
    "rs_dpo": ("min_gap",),
}
PAIRS = ("rso", "rs_dpo")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(Flags):
    """Choice of the sampled responses to keep."""

    keep: str = option(
        "best",
        "What is kept of the responses to a prompt. Written for SFT: all of them; the best; those with a reward above "
        "--threshold (rest); a sample of the policy that is optimal for the reward (rejection_sampling). Written as "
        "preferences: random pairs of that sample (rso), or all pairs whose rewards are more than --min_gap apart "
        "(rs_dpo).",
        choices=tuple(KEEP_FLAGS),
        changeable=True,
    )
    threshold: float = option(0.0, "--keep rest keeps rewards above this (ReST's τ).", changeable=True)
    min_gap: float = option(
        0.0,
        "--keep rs_dpo keeps pairs whose rewards differ by more than this (τ log(η/(1-η)) of RS-DPO).",
        at_least=0,
        changeable=True,
    )
    beta: float = option(
        0.5,
        "KL coefficient of the policy that --keep rejection_sampling and rso sample: responses are accepted with "
        "probability exp((r - highest r) / beta) (RSO: 0.5).",
        above=0,
        changeable=True,
    )
    accept: int = option(
        8,
        "Responses to each prompt that --keep rejection_sampling and rso accept (RSO: 8 of 64).",
        at_least=1,
        changeable=True,
    )
    keep_unfinished: bool = option(
        False,
        "Also keep responses that were cut at --max_response_tokens. Training adds an end-of-sequence to them, and so "
        "teaches to stop there.",
        changeable=True,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.keep == "rso" and self.accept < 2:
            raise UserError(f"--accept must be at least 2 for pairs, got {self.accept}")
        for flag in fields(SelectionConfig):
            users = [keep for keep, names in KEEP_FLAGS.items() if flag.name in names]
            if users and self.keep not in users and getattr(self, flag.name) != flag.default:
                raise UserError(f"--{flag.name} does nothing without --keep {' or '.join(users)}")


class Candidates(NamedTuple):
    """Responses to one prompt that a record may hold, with their rewards."""

    texts: list[str]
    rewards: list[float]


def valid_candidates(samples: Samples, *, unfinished: bool) -> Candidates:
    """Leaves out empty responses, which no layout can hold, and, unless `unfinished`, those without end-of-sequence: as
    data they would have one, and teach to stop there.
    """
    kept = [
        (text, reward)
        for text, finished, reward in zip(samples.responses, samples.finished, samples.rewards, strict=True)
        if text.strip() and (finished or unfinished)
    ]
    return Candidates([text for text, _ in kept], [reward for _, reward in kept])


def kept_records(samples: Samples, config: SelectionConfig, seed: int) -> list[Record]:
    """The records kept of a prompt. Random choices depend only on the seed and the prompt's number."""
    candidates = valid_candidates(samples, unfinished=config.keep_unfinished)
    rewards, random = candidates.rewards, np.random.default_rng([seed, samples.number])
    match config.keep:
        case "all":
            return demonstrations(samples.prompt, candidates, range(len(rewards)))
        case "best":
            return demonstrations(samples.prompt, candidates, best(rewards))
        case "rest":
            return demonstrations(samples.prompt, candidates, above(rewards, config.threshold))
        case "rejection_sampling":
            chosen = accepted(candidates, config.beta, config.accept, random)
            return demonstrations(samples.prompt, candidates, chosen)
        case "rso":
            chosen = accepted(candidates, config.beta, config.accept, random)
            return preferences(samples.prompt, candidates, pairs_at_random(chosen, rewards, random))
        case _:
            return preferences(samples.prompt, candidates, pairs_apart(rewards, config.min_gap))


# --- by rewards -----------------------------------------------------------------------------------------------------


def best(rewards: Sequence[float]) -> list[int]:
    """The first response with the highest reward; none if there are no responses."""
    return [max(range(len(rewards)), key=lambda i: rewards[i])] if rewards else []


def above(rewards: Sequence[float], threshold: float) -> list[int]:
    """Responses with a reward above the threshold: 1[r > τ] of ReST (arXiv 2308.08998, section 3)."""
    return [i for i, reward in enumerate(rewards) if reward > threshold]


def accepted(candidates: Candidates, beta: float, count: int, random: np.random.Generator) -> list[int]:
    """Statistical rejection sampling: samples of the policy that is optimal for reward / β, from samples of this one.

    As in RSO (arXiv 2309.06657, algorithm 1), different texts are accepted one after the other with probability
    exp((r − r_max) / β), r_max over those left, until there are `count` of them or none is left.
    """
    left = [i for i, text in enumerate(candidates.texts) if candidates.texts.index(text) == i]
    chosen: list[int] = []
    while left and len(chosen) < count:
        highest = max(candidates.rewards[i] for i in left)
        for i in list(left):
            if len(chosen) < count and random.random() < exp((candidates.rewards[i] - highest) / beta):
                chosen.append(i)
                left.remove(i)
    return chosen


def pairs_apart(rewards: Sequence[float], min_gap: float) -> list[tuple[int, int]]:
    """All (better, worse) whose rewards differ by more than `min_gap`: σ((r_w − r_l) / τ) > η of RS-DPO (arXiv
    2402.10038, algorithm 1) with min_gap = τ log(η / (1 − η)).
    """
    numbers = range(len(rewards))
    return [(i, j) for i in numbers for j in numbers if rewards[i] - rewards[j] > min_gap]


def pairs_at_random(
    chosen: Sequence[int], rewards: Sequence[float], random: np.random.Generator
) -> list[tuple[int, int]]:
    """(better, worse) of disjoint pairs; those of equal rewards, of which none is better, are left out."""
    drawn = [chosen[i] for i in random.permutation(len(chosen))]
    pairs = zip(drawn[::2], drawn[1::2], strict=False)
    return [(i, j) if rewards[i] > rewards[j] else (j, i) for i, j in pairs if rewards[i] != rewards[j]]


# --- records --------------------------------------------------------------------------------------------------------


def demonstrations(prompt: Prompt, candidates: Candidates, chosen: Sequence[int]) -> list[Record]:
    texts, rewards = candidates
    return [{"prompt": prompt, "completion": in_prompt_form(prompt, texts[i]), "reward": rewards[i]} for i in chosen]


def preferences(prompt: Prompt, candidates: Candidates, pairs: Sequence[tuple[int, int]]) -> list[Record]:
    """margin: the difference of the rewards. Pairs of texts that differ only in white space at their ends, which chat
    templates take off, are left out.
    """
    texts, rewards = candidates
    return [
        {
            "prompt": prompt,
            "chosen": in_prompt_form(prompt, texts[better]),
            "rejected": in_prompt_form(prompt, texts[worse]),
            "margin": rewards[better] - rewards[worse],
        }
        for better, worse in pairs
        if texts[better].strip() != texts[worse].strip()
    ]


def in_prompt_form(prompt: Prompt, text: str) -> str | list[Message]:
    """The response in the prompt's form: a text, or a list of messages."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
