"""Rewards of tasks whose answers are known, for `--reward fastp3o.rewards.verifiable:exact_match`."""

from collections.abc import Sequence


def exact_match(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[object]) -> list[float]:
    """1 if the response is the answer, a text or a number, except for white space around it; else 0."""
    pairs = zip(responses, answer, strict=True)
    return [float(response.strip() == str(expected).strip()) for response, expected in pairs]
