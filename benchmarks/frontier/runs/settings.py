"""Two responses to a prompt, and PPO's critic."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import arm, required, selection_runs

# The first of each are those of one_run.PPO_SETTINGS; with them PPO's own rate is the one below.
CRITIC_RATES, VALUE_CLIPS, RATE = (0.0, 1e-3, 4e-3), (0.0, 1.0, 0.2), 3e-4


def two_responses() -> Iterator[Run]:
    return (arm(algorithm, 2) for algorithm in ("joint", "ppo"))


def critics() -> list[Run]:
    """PPO with every critic rate and value clip that is tried."""
    return [
        replace(arm("ppo"), critic_learning_rate=rate, value_clip_range=clip)
        for rate, clip in product(CRITIC_RATES, VALUE_CLIPS)
    ]


def critic_trials() -> Iterator[Run]:
    for one in critics():
        yield from selection_runs(one, RATE)


def tuned_critic() -> Iterator[Run]:
    """PPO with the critic that did best."""
    yield replace(arm("ppo"), **required("critic", "critics"))
