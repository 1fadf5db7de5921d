"""Preferences from a judge's verdicts on pairs of sampled responses (RLAIF, arXiv 2309.00267)."""

from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fastp3o.data.layouts import Message
from fastp3o.endpoint import EndpointError
from fastp3o.evaluation.judge import Judge
from fastp3o.evaluation.verdicts import Verdict
from fastp3o.stages.generate.samples import Samples
from fastp3o.stages.generate.selection import Record, disjoint_pairs, in_prompt_form, valid_candidates


class JudgedPair(NamedTuple):
    """Two responses to the prompt of this number, and the better one."""

    number: int
    prompt: str | list[Message]
    texts: tuple[str, str]
    verdict: Verdict

    @property
    def record(self) -> Record:
        first, second = self.texts
        chosen, rejected = (first, second) if self.verdict is Verdict.FIRST else (second, first)
        return {
            "prompt": self.prompt,
            "chosen": in_prompt_form(self.prompt, chosen),
            "rejected": in_prompt_form(self.prompt, rejected),
        }


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
    asked = [JudgedPair(*pair, Verdict.NONE) for one in samples for pair in drawn_pairs(one, unfinished, seed)]
    try:
        verdicts = judge(
            [plain_text(pair.prompt) for pair in asked],
            [pair.texts[0] for pair in asked],
            [pair.texts[1] for pair in asked],
        )
    except EndpointError as error:
        raise EndpointError(f"{error}. --resume asks for the verdicts that are missing, and samples nothing") from error
    pairs = [pair._replace(verdict=verdict) for pair, verdict in zip(asked, verdicts, strict=True)]
    decided = [pair for pair in pairs if pair.verdict in (Verdict.FIRST, Verdict.SECOND)]
    records = {number: [pair.record for pair in own] for number, own in groupby(decided, lambda pair: pair.number)}
    ties, unanswered = (sum(pair.verdict is verdict for pair in pairs) for verdict in (Verdict.TIE, Verdict.NONE))
    return Judged(records, ties, unanswered)


def drawn_pairs(
    samples: Samples, unfinished: bool, seed: int
) -> list[tuple[int, str | list[Message], tuple[str, str]]]:
    """Number, prompt and texts of each pair. Texts that differ only in white space at their ends are no pair."""
    texts = valid_candidates(samples, unfinished=unfinished).texts
    pairs = disjoint_pairs(range(len(texts)), np.random.default_rng([seed, samples.number]))
    return [
        (samples.number, samples.prompt, (texts[i], texts[j])) for i, j in pairs if texts[i].strip() != texts[j].strip()
    ]


def plain_text(prompt: str | list[Message]) -> str:
    """A prompt as a judge reads it: of several messages each with its role."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return prompt[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
