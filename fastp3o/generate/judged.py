"""Preferences from a judge's verdicts on pairs of sampled responses (RLAIF, arXiv 2309.00267)."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from fastp3o.data.layouts import Message
from fastp3o.endpoint import EndpointError
from fastp3o.evaluation.judge import Judge
from fastp3o.evaluation.verdicts import Verdict
from fastp3o.generate.samples import Samples
from fastp3o.generate.selection import Record, disjoint_pairs, preference, valid_candidates


class Judged(NamedTuple):
    """records: by the prompts' numbers. ties, unanswered: pairs that are left out."""

    records: dict[int, list[Record]]
    ties: int
    unanswered: int


def judged_records(samples: Iterable[Samples], judge: Judge, *, unfinished: bool, seed: int) -> Judged:
    """Asks a judge about random pairs of each prompt's responses, each response in one of them.

    unfinished: whether responses without an end-of-sequence take part. Raises EndpointError if the judge's endpoint
    refuses or fails: what it has answered is in its file.
    """
    pairs = [(one.number, one.prompt, *texts) for one in samples for texts in drawn_pairs(one, unfinished, seed)]
    try:
        verdicts = judge(
            [plain_text(prompt) for _, prompt, *_ in pairs],
            [first for *_, first, _ in pairs],
            [second for *_, second in pairs],
        )
    except EndpointError as error:
        raise EndpointError(f"{error}. --resume asks for the verdicts that are missing, and samples nothing") from error
    records: dict[int, list[Record]] = {}
    for (number, prompt, first, second), verdict in zip(pairs, verdicts, strict=True):
        if verdict is Verdict.FIRST:
            records.setdefault(number, []).append(preference(prompt, first, second))
        elif verdict is Verdict.SECOND:
            records.setdefault(number, []).append(preference(prompt, second, first))
    return Judged(records, verdicts.count(Verdict.TIE), verdicts.count(Verdict.NONE))


def drawn_pairs(samples: Samples, unfinished: bool, seed: int) -> list[tuple[str, str]]:
    """The texts of each pair. Texts that differ only in white space at their ends are no pair."""
    texts = valid_candidates(samples, unfinished=unfinished).texts
    pairs = disjoint_pairs(range(len(texts)), np.random.default_rng([seed, samples.number]))
    return [(texts[i], texts[j]) for i, j in pairs if texts[i].strip() != texts[j].strip()]


def plain_text(prompt: str | list[Message]) -> str:
    """A prompt as a judge reads it: of several messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
