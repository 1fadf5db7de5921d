"""Makes records of responses that are chosen by their rewards or a judge's verdicts (RLAIF, arXiv
2309.00267).

A record of one response is a demonstration (SFT), one of two a preference; both are layouts of
data/README.md.
"""

from collections.abc import Iterable, Sequence
from math import exp
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from fastp3o.calls.endpoint import EndpointError
from fastp3o.data.layouts import Message, in_prompt_form
from fastp3o.evaluation.judge import Judge
from fastp3o.generate.config import SelectionConfig
from fastp3o.generate.samples import Samples
from fastp3o.rewards.judge import plain_text
from fastp3o.rewards.verdicts import Verdict

Record = dict[str, Any]
Prompt = str | list[Message]


class Candidates(NamedTuple):
    """Responses to one prompt that a record may hold, with their rewards."""

    texts: list[str]
    rewards: list[float]


def valid_candidates(samples: Samples, *, unfinished: bool) -> Candidates:
    """Leaves out empty responses, which no layout can hold, those that as data would be other
    tokens than were sampled, and, unless `unfinished`, those without end-of-sequence: as data they
    would have one, and teach to stop there. Without a reward all have 0.
    """
    rewards = samples.rewards or [0.0] * len(samples.responses)
    responses = zip(samples.responses, samples.finished, samples.read_back, rewards, strict=True)
    kept = [
        (text, reward)
        for text, finished, read_back, reward in responses
        if text.strip() and read_back and (finished or unfinished)
    ]
    return Candidates([text for text, _ in kept], [reward for _, reward in kept])


def kept_records(samples: Samples, config: SelectionConfig, seed: int) -> list[Record]:
    """The records kept of a prompt. Random choices depend only on the seed and the prompt's number."""
    candidates = valid_candidates(samples, unfinished=config.keep_unfinished)
    rewards, random = candidates.rewards, np.random.default_rng([seed, samples.number])
    # The first of the highest: of a tournament, the rounds that it survived.
    match config.keep:
        case "all":
            return demonstrations(samples.prompt, candidates, range(len(rewards)))
        case "best" | "tournament":
            return demonstrations(
                samples.prompt, candidates, [rewards.index(max(rewards))] if rewards else []
            )
        case "rest":  # 1[r > τ] of ReST (arXiv 2308.08998, section 3)
            above = [i for i, reward in enumerate(rewards) if reward > config.threshold]
            return demonstrations(samples.prompt, candidates, above)
        case "rejection_sampling":
            chosen = accepted(candidates, config.beta, config.accept, random)
            return demonstrations(samples.prompt, candidates, chosen)
        case "rso":
            chosen = accepted(candidates, config.beta, config.accept, random)
            return preferences(samples.prompt, candidates, pairs_at_random(chosen, rewards, random))
        case "rs_dpo":
            return preferences(samples.prompt, candidates, pairs_apart(rewards, config.min_gap))
        case "revised" | "revised_pairs":
            return revised_records(
                samples, pairs=config.keep == "revised_pairs", unfinished=config.keep_unfinished
            )
        case _:
            return []


# --- by rewards -----------------------------------------------------------------------------------


def accepted(candidates: Candidates, beta: float, count: int, random: Generator) -> list[int]:
    """Statistical rejection sampling: samples of the policy that is optimal for reward / β, from
    samples of this one.

    As in RSO (arXiv 2309.06657, algorithm 1), different texts are accepted one after the other with
    probability exp((r − r_max) / β), r_max over those left, until there are `count` of them or none
    is left.
    """
    left = [i for i, text in enumerate(candidates.texts) if candidates.texts.index(text) == i]
    chosen: list[int] = []
    while left and len(chosen) < count:
        highest = max(candidates.rewards[i] for i in left)
        for i in list(left):
            if len(chosen) < count and random.random() < exp(
                (candidates.rewards[i] - highest) / beta
            ):
                chosen.append(i)
                left.remove(i)
    return chosen


def pairs_apart(rewards: Sequence[float], min_gap: float) -> list[tuple[int, int]]:
    """All (better, worse) whose rewards differ by more than `min_gap`: σ((r_w − r_l) / τ) > η of
    RS-DPO (arXiv 2402.10038, algorithm 1) with min_gap = τ log(η / (1 − η)).
    """
    numbers = range(len(rewards))
    return [(i, j) for i in numbers for j in numbers if rewards[i] - rewards[j] > min_gap]


def pairs_at_random(
    chosen: Sequence[int], rewards: Sequence[float], random: Generator
) -> list[tuple[int, int]]:
    """(better, worse) of disjoint pairs; those of equal rewards, of which none is better, are left
    out.
    """
    pairs = disjoint_pairs(chosen, random)
    return [
        (i, j) if rewards[i] > rewards[j] else (j, i) for i, j in pairs if rewards[i] != rewards[j]
    ]


def disjoint_pairs(chosen: Sequence[int], random: Generator) -> list[tuple[int, int]]:
    """Pairs at random, each response in one of them; an odd one out is left out."""
    drawn = [chosen[i] for i in random.permutation(len(chosen))]
    return list(zip(drawn[::2], drawn[1::2], strict=False))


# --- records --------------------------------------------------------------------------------------


def demonstrations(prompt: Prompt, candidates: Candidates, chosen: Sequence[int]) -> list[Record]:
    texts, rewards = candidates
    return [
        {"prompt": prompt, "completion": in_prompt_form(prompt, texts[i]), "reward": rewards[i]}
        for i in chosen
    ]


def preferences(
    prompt: Prompt, candidates: Candidates, pairs: Sequence[tuple[int, int]]
) -> list[Record]:
    """margin: the difference of rewards. Texts that differ in white space at their ends alone are
    no pair.
    """
    texts, rewards = candidates
    return [
        preference(prompt, texts[better], texts[worse])
        | {"margin": rewards[better] - rewards[worse]}
        for better, worse in pairs
        if texts[better].strip() != texts[worse].strip()
    ]


def preference(prompt: Prompt, chosen: str, rejected: str) -> Record:
    return {
        "prompt": prompt,
        "chosen": in_prompt_form(prompt, chosen),
        "rejected": in_prompt_form(prompt, rejected),
    }


def revised_records(samples: Samples, *, pairs: bool, unfinished: bool) -> list[Record]:
    """Last revisions, or pairs of them and the first turns, the responses. Between any two there is
    a critique.
    """
    ends = [
        (turns[-1]["text"], turns[0]["text"])
        for turns, finished in zip(samples.turns, samples.finished, strict=True)
        if len(turns) % 2 and turns[-1]["text"].strip() and turns[1:] and (finished or unfinished)
        if turns[-1]["read_back"] and (turns[0]["read_back"] or not pairs)
    ]
    if pairs:
        return [
            preference(samples.prompt, last, first)
            for last, first in ends
            if last.strip() != first.strip()
        ]
    return [
        {"prompt": samples.prompt, "completion": in_prompt_form(samples.prompt, last)}
        for last, _ in ends
    ]


class Judged(NamedTuple):
    """records: by the prompts' numbers. ties, unanswered: pairs that are left out."""

    records: dict[int, list[Record]]
    ties: int
    unanswered: int


def judged_records(
    samples: Iterable[Samples], judge: Judge, *, unfinished: bool, seed: int
) -> Judged:
    """Asks a judge about random pairs of each prompt's responses, each response in one of them.
    unfinished: whether responses without an end-of-sequence take part. Raises EndpointError if the
    judge's endpoint refuses or fails: what it has answered is in its file.
    """
    pairs = []
    for sample in samples:
        texts = valid_candidates(sample, unfinished=unfinished).texts
        drawn = disjoint_pairs(range(len(texts)), np.random.default_rng([seed, sample.number]))
        # Texts that differ only in white space at their ends are no pair.
        differ = [(texts[i], texts[j]) for i, j in drawn if texts[i].strip() != texts[j].strip()]
        pairs += [(sample.number, sample.prompt, *two) for two in differ]
    try:
        verdicts = judge(
            [plain_text(prompt) for _, prompt, *_ in pairs],
            [first for *_, first, _ in pairs],
            [second for *_, second in pairs],
        )
    except EndpointError as error:
        raise EndpointError(
            f"{error}. --resume asks for the verdicts that are missing, and samples nothing"
        ) from error
    records: dict[int, list[Record]] = {}
    for (number, prompt, first, second), verdict in zip(pairs, verdicts, strict=True):
        if verdict is Verdict.FIRST:
            records.setdefault(number, []).append(preference(prompt, first, second))
        elif verdict is Verdict.SECOND:
            records.setdefault(number, []).append(preference(prompt, second, first))
    return Judged(records, verdicts.count(Verdict.TIE), verdicts.count(Verdict.NONE))
