"""What rewards may add: offsets of any size, and a scale that differs between prompts."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import RESULTS, arm, results

DEVIATIONS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)  # of the offset, in those of the reward
PPO_RATES = (1.5e-4, 3e-4, 6e-4)
INVARIANT = ("joint", "rloo", "grpo", "ppo_centred")  # to an offset
SCALED = ("joint", "grpo-k1", "grpo", "dr_grpo", "rloo-token", "rloo", "ppo")
BITS_UPDATES = 10
SPREAD = 1.0  # standard deviation of the log of a prompt's factor


def without_offset() -> Iterator[Run]:
    return (arm(algorithm) for algorithm in INVARIANT)


def ppo(deviation: float, rate: float) -> Run:
    """PPO under an offset of this standard deviation."""
    plain = replace(arm("ppo"), learning_rate=rate)
    return replace(plain, offset="unlearnable", offset_sd=deviation) if deviation else plain


def offset_doses() -> Iterator[Run]:
    """PPO at three rates under offsets that nothing predicts, and the others without one."""
    for seed, task in RESULTS:
        for deviation in reversed(DEVIATIONS):
            for rate in PPO_RATES:
                yield replace(ppo(deviation, rate), task=task, seed=seed)
    yield from results(without_offset())


def offset_bits() -> Iterator[Run]:
    """Algorithms that see only differences within a prompt, on one language: one machine makes all
    of them.
    """
    for run in (
        replace(one, updates=BITS_UPDATES) for one in results(without_offset()) if one.seed == 0
    ):
        yield from (
            replace(run, offset="unlearnable", offset_sd=sd) if sd else run for sd in DEVIATIONS
        )


def scales() -> Iterator[Run]:
    """With a factor per prompt and without."""
    for responses in (4, 16):
        for spread in (SPREAD, 0.0):
            for algorithm in SCALED:
                yield arm(algorithm, responses, reward_spread=spread)
