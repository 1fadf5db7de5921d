"""Runs on rollouts of an older policy: every algorithm with its best correction and rate, at each lag.

All runs of a cell, a lag with a number of responses per prompt, have equally many responses in an update. The settings
of each are chosen by reward − BETA KL at the end, which is what they train for, on languages and seeds that no result
uses.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.frontier.runs.plan import CLIPPINGS, Run
from benchmarks.frontier.tasks.groups import MANY_LANGUAGES, TASKS

BETA = 0.1  # the KL coefficient of all, in standard deviations of the reward per nat
RATES = (3e-4, 6e-4, 1.5e-4, 1.2e-3)
LAGS = (6, 0, 2)  # the one that says most first
PROMPTS = {4: 32, 16: 8}  # responses per prompt -> prompts of an update

# Algorithm and its own parameter. REBEL's was best for reward − BETA KL in the comparison before.
COMPARED = (
    *((name, 0.0) for name in (*CLIPPINGS, "ppo", "grpo", "dapo")),
    *(("gspo", 0.003), ("gspo", 0.03), ("rloo", 0.0), ("rebel", 3.0)),
)
CORRECTIONS = ("none", "ratios", "weights")
# The correction that is P3O's own, and RLOO with whole ratios and without: they run whether chosen or not.
ALWAYS = {**{name: ("ratios",) for name in CLIPPINGS}, "rloo": ("none", "weights")}
# Corrections are compared here, with half of the rates.
LAG_OF_CORRECTIONS, RESPONSES_OF_CORRECTIONS = 6, 4

RESULTS = tuple(enumerate(TASKS[MANY_LANGUAGES][:8]))  # seed, task
SELECTION = tuple(zip((100, 101), TASKS[MANY_LANGUAGES][8:], strict=True))

# Choices of the selection runs: "corrections" -> algorithm with its own parameter -> correction; "rates" -> the name
# of an arm -> rate.
CHOSEN = Path(__file__).parent / "stale.json"


def arm(algorithm: str, own: float, lag: int, responses: int, correction: str) -> Run:
    """A cell's runs of an algorithm, but for task, seed and learning rate."""
    return Run(
        "",
        algorithm,
        0.0,
        BETA,
        0,
        responses_per_prompt=responses,
        prompts_per_update=PROMPTS[responses],
        own_parameter=own,
        rounds_ahead=lag,
        correction=correction,
    )


def corrections_of(algorithm: str) -> tuple[str, ...]:
    """RLOO has no ratios."""
    return tuple(name for name in CORRECTIONS if algorithm != "rloo" or name != "ratios")


def label(algorithm: str, own: float) -> str:
    """The name of an algorithm with its own parameter in CHOSEN."""
    return f"{algorithm} {own:g}" if own else algorithm


def chosen() -> dict[str, dict]:
    return json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}


def chosen_correction(algorithm: str, own: float) -> str:
    found = chosen().get("corrections", {}).get(label(algorithm, own))
    if found is None:
        raise ValueError(f"{CHOSEN} has no correction of {label(algorithm, own)}: run the part `corrections` first")
    return found


def chosen_rate(of: Run) -> float:
    rate = chosen().get("rates", {}).get(of.name)
    if rate is None:
        raise ValueError(f"{CHOSEN} has no rate of {of.name}: run the part `rates_at_lag_{of.rounds_ahead}` first")
    return rate


def arms(lag: int) -> Iterator[Run]:
    """What is compared at a lag: with fresh rollouts nothing needs a correction."""
    for responses in PROMPTS:
        for algorithm, own in COMPARED:
            best = chosen_correction(algorithm, own) if lag else "none"
            for correction in dict.fromkeys([best, *(ALWAYS.get(algorithm, ()) if lag else ())]):
                yield arm(algorithm, own, lag, responses, correction)


def selection_runs(of: Run, rate: float) -> list[Run]:
    return [replace(of, task=task, seed=seed, learning_rate=rate) for seed, task in SELECTION]


def corrections(group: str) -> Iterator[Run]:
    """Every algorithm with every correction."""
    for rate in RATES[:2]:
        for algorithm, own in COMPARED:
            for correction in corrections_of(algorithm):
                of = arm(algorithm, own, LAG_OF_CORRECTIONS, RESPONSES_OF_CORRECTIONS, correction)
                yield from selection_runs(of, rate)


def rates(group: str, lag: int) -> Iterator[Run]:
    """Every arm of a lag at every rate."""
    for rate in RATES:
        for one in arms(lag):
            yield from selection_runs(one, rate)


def results(group: str, lag: int) -> Iterator[Run]:
    """Every arm of a lag at its rate, all of one language before the next."""
    for seed, task in RESULTS:
        for one in arms(lag):
            yield replace(one, task=task, seed=seed, learning_rate=chosen_rate(one))
