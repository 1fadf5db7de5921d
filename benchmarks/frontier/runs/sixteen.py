"""Sixteen responses to a prompt: does GRPO catch up with another clip range or KL coefficient?"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import arm

NARROW, HEAVY = 0.1, 0.3  # half of the usual clip range, three times the usual KL coefficient


def groups_of_sixteen() -> Iterator[Run]:
    for own in (0.0, NARROW):
        yield arm("grpo", 16, own)
        yield replace(arm("grpo", 16, own), kl_coef=HEAVY)
    yield arm("dr_grpo", 16)
    yield arm("gspo", 16, 0.03)
    yield arm("joint", 16)
    yield replace(arm("joint", 16), kl_coef=HEAVY)
