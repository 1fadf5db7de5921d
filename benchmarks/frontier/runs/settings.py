"""Two responses to a prompt, and PPO's critic."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import arm, chosen, selection_runs

# The first of each are those of one_run.PPO_SETTINGS; with them PPO's own rate is the one below.
CRITIC_RATES, VALUE_CLIPS, RATE = (0.0, 1e-3, 4e-3), (0.0, 1.0, 0.2), 3e-4


def two_responses() -> Iterator[Run]:
    """PPO's rate was chosen on two languages before: 3e-4 has 1.24 there, half and twice of it less."""
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


def tuned_critic() -> list[Run]:
    """PPO with the critic that did best; nothing before `critics` has run."""
    return [replace(arm("ppo"), **chosen()["critic"])] if "critic" in chosen() else []
