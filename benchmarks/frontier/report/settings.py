"""What one setting does to an algorithm: where the KL stands, clipped ratios, the centre, a rate
that is found.
"""

from collections.abc import Iterator

from benchmarks.frontier.runs import settings
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import arm

# An algorithm with another setting -> as it was before.
CHANGED = {
    "grpo-k1": "grpo",
    "dr_grpo-k1": "dr_grpo",
    "dapo-k1": "dapo",
    "rloo-token": "rloo",
    "rloo-response": "rloo",
}


def pairs() -> Iterator[tuple[Run, Run]]:
    """With the setting and without."""
    for responses in (4, 16):
        yield from (
            (arm(first, responses), arm(second, responses)) for first, second in CHANGED.items()
        )
    joint, ppo = settings.two_responses()
    yield joint, ppo
    yield from ((arm(one.algorithm), one) for one in settings.two_responses())
    yield from ((one, arm("joint")) for one in settings.found_rates())
    yield arm("ppo"), arm("ppo_centred")
