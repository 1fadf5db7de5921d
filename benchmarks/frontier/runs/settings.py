"""Two responses to a prompt, and learning rates that are found."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import RESULTS, arm

# What a rate is found from, and the nats of an update that it follows.
FIRST_RATES, KL_PER_UPDATE = (1e-6, 1e-5, 1e-4, 1e-3), 0.3


def two_responses() -> Iterator[Run]:
    """PPO's rate was chosen on two languages before: 3e-4 has 1.24 there, half and twice of it
    less.
    """
    return (arm(algorithm, 2) for algorithm in ("joint", "ppo"))


def found_rates() -> list[Run]:
    return [
        replace(arm("joint"), learning_rate=rate, kl_per_update=KL_PER_UPDATE)
        for rate in FIRST_RATES
    ]


def found_rates_results() -> Iterator[Run]:
    for seed, task in RESULTS:
        yield from (replace(one, task=task, seed=seed) for one in found_rates())
