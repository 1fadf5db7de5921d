"""Every algorithm over all rates and KL coefficients, each with four responses to a prompt, compared at equal KL.

A setting with a run that does not get beyond the highest KL in the usual updates runs again with more of them, so that
no setting is ruled out for being slow.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.stale import COMPARED, label
from benchmarks.frontier.runs.tuned_arms import RESULTS, arm, rates_of, required, selection_runs

EVERYONE = (*COMPARED, ("dr_grpo", 0.0), ("dpo", 0.0))
KLS = (1.0, 2.0)  # nats per response
MORE_UPDATES = 40
# The weight of the KL penalty, in standard deviations of the reward per nat; for online DPO its own beta.
KL_COEFS, DPO_BETAS = (0.03, 0.1, 0.3), (0.1, 0.3, 1.0)


def settings(algorithm: str, own: float) -> list[Run]:
    """The combinations that are tried of an algorithm: arms with a learning rate."""
    base, coefs = arm(algorithm, own=own), DPO_BETAS if algorithm == "dpo" else KL_COEFS
    return [replace(base, kl_coef=coef, learning_rate=rate) for coef, rate in product(coefs, rates_of(base))]


def equal_kl_trials() -> Iterator[Run]:
    """Every setting of every algorithm."""
    for algorithm, own in EVERYONE:
        for one in settings(algorithm, own):
            yield from selection_runs(one, one.learning_rate)


def slow_settings() -> dict[str, float]:
    """The names of the settings that were too slow, with the KL that they got to."""
    return required("slow_settings", "equal_kl_trials")


def equal_kl_longer() -> Iterator[Run]:
    """The settings that were too slow, with more updates."""
    slow = slow_settings()
    for algorithm, own in EVERYONE:
        for one in settings(algorithm, own):
            if one.name in slow:
                yield from selection_runs(replace(one, updates=MORE_UPDATES), one.learning_rate)


def equal_kl() -> Iterator[Run]:
    """Every algorithm with the setting that was chosen for each KL."""
    found = required("equal_kl", "equal_kl_longer")
    for seed, task in RESULTS:
        for pair in EVERYONE:
            ours = [Run(**found[label(*pair)][f"{kl:g}"]) for kl in KLS if f"{kl:g}" in found[label(*pair)]]
            for one in dict.fromkeys(ours):
                yield replace(one, task=task, seed=seed)
