"""Rewards of tasks whose answers are known, for `--reward fastp3o.rewards.verifiable:exact_match`."""

import logging
import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal

from fastp3o.calls.time_limit import TookTooLongError, time_limit
from fastp3o.errors import UserError

__all__ = ["exact_match", "math_answer", "word_overlap"]

ANSWER_SECONDS = 5.0
UNIT = re.compile(r"(?<=\d)\s+[a-zA-Z]{2}[a-zA-Z ]*\.?$")


def exact_match(
    prompts: Sequence[str], responses: Sequence[str], answer: Sequence[object]
) -> list[float]:
    """1 if the response is the answer, a text or a number, except for white space around it; else
    0.
    """
    return [
        float(response.strip() == str(true).strip())
        for response, true in zip(responses, answer, strict=True)
    ]


def math_answer(
    prompts: Sequence[str], responses: Sequence[str], answer: Sequence[object]
) -> list[float]:
    """1 if the response's final answer equals the answer's, as math-verify reads both; else 0, also
    if it has none or that takes 5 s. An answer that is no `final_answer` in a text is one as a
    whole. Where it is a number, words after the response's number are a unit, which does not count.

    Raises UserError without math-verify, and for an answer in which it reads no mathematics.
    """
    try:
        import math_verify
    except ImportError as error:
        raise UserError(
            "math_answer needs the library math-verify: pip install 'fastp3o[math]'"
        ) from error
    # It warns that it has no time limit: its own would end ours, and fail in threads.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(text: str) -> list:
        return math_verify.parse(rf"\boxed{{{text.strip().rstrip('.')}}}", parsing_timeout=None)

    def equal(text: str, response: str) -> bool:
        try:
            with time_limit(ANSWER_SECONDS):
                final = final_answer(response)
                if final and not re.search("[a-zA-Z]", text):
                    final = UNIT.sub("", final)
                return final is not None and math_verify.verify(
                    known[text], read(final), timeout_seconds=None
                )
        except TookTooLongError as error:
            if error.args != (ANSWER_SECONDS,):  # the whole call has
                raise
            return False

    true_texts = [
        f"{Decimal(str(one)):f}" if isinstance(one, float) else str(one) for one in answer
    ]
    known: dict[str, list] = {}
    for text in {*true_texts}:
        final = final_answer(text)
        known[text] = read(text if final is None else final)
        if all(isinstance(one, str) for one in known[text]):
            # Text that it could not read, or nothing.
            raise UserError(f"math-verify reads no mathematics in the answer {text!r}")
    return [
        float(equal(true, response)) for response, true in zip(responses, true_texts, strict=True)
    ]


def final_answer(text: str) -> str | None:
    """The content of the last `\\boxed{}` in a text, or else the rest of the line after its last
    `####`.
    """
    *before, rest = re.split(r"\\boxed\s*{", text)
    depth = 1
    for brace in re.finditer(r"\\.|[{}]", rest if before else ""):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if not depth:
            return rest[: brace.start()]
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0] if mark else None


def word_overlap(
    prompts: Sequence[str], responses: Sequence[str], label: Sequence[str]
) -> list[float]:
    """ROUGE-1 (Lin 2004): the harmonic mean of the share of the response's words that are the
    label's, and the share of the label's that are the response's, each as often as it occurs. From
    0 to 1; case does not count.
    """
    words = [Counter(re.findall(r"\w+", text.lower())) for text in (*responses, *label)]
    pairs = zip(words[: len(responses)], words[len(responses) :], strict=True)
    return [
        2 * (first & other).total() / max(1, first.total() + other.total())
        for first, other in pairs
    ]
