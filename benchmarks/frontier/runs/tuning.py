"""Every algorithm tuned by the same rules, over learning rate and KL coefficient, and run where that led.

What is defined by a group of responses, its mean and deviation, takes four responses to half as many prompts: of two
responses GRPO's advantages are signs. The other algorithms take pairs, and groups of four for comparison.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.frontier.runs.plan import (
    EVERYONE,
    KL_COEFS,
    PROMPTS_PER_UPDATE,
    SEEDS,
    SELECTION_SEEDS,
    Run,
    basic_run,
    task_of,
)
from benchmarks.frontier.tasks.groups import RETUNED, TASKS

BY_GROUPS = ("grpo", "dr_grpo", "dapo", "gspo")

# Trials on the selection seeds, the middle first. RLOO makes one pass over a round, a fourth of the steps of the
# others; DPO's steps are larger.
TRIAL_RATES = dict.fromkeys(EVERYONE, (3e-4, 6e-4, 1.5e-4)) | {
    "rloo": (6e-4, 1.2e-3, 3e-4),
    "dpo": (1.5e-4, 3e-4, 7.5e-5),
}
OWN_TRIALS = {"rebel": (1.0, 3.0, 10.0), "gspo": (0.01, 0.03, 0.003)}
MIDDLE = 1  # of an algorithm's KL_COEFS
LARGE, SMALL = 2, 0

# Where settings are chosen, in nats per response, each for itself.
ENVELOPE_KLS = (1.0, 2.0)
# Where parameters of one algorithm are chosen, and whose settings questions vary.
OWN_KL, QUESTIONS_KL = 1.0, 2.0

# What the selection seeds chose: group -> "own_parameter" -> algorithm -> value; "settings" -> algorithm -> KL -> rate
# and KL coefficient.
TUNED = Path(__file__).parent / "tuned.json"


def tuned() -> dict:
    return json.loads(TUNED.read_text()) if TUNED.exists() else {}


def own_parameter(group: str, algorithm: str) -> float:
    """What was chosen; 0, the default, of algorithms that have none to choose. ValueError where it was not chosen."""
    chosen = tuned().get(group, {}).get("own_parameter", {})
    if algorithm in OWN_TRIALS and algorithm not in chosen:
        raise ValueError(f"{TUNED} has no parameter of {algorithm} for {group}: run the part `own_parameters` first")
    return chosen.get(algorithm, 0.0)


def settings(group: str, algorithm: str) -> dict[float, tuple[float, float]]:
    """KL -> learning rate and KL coefficient. ValueError where nothing was chosen."""
    chosen = tuned().get(group, {}).get("settings", {})
    if algorithm not in chosen:
        raise ValueError(f"{TUNED} has no settings of {algorithm} for {group}: run the part `trial_rates` first")
    return {float(kl): (setting["learning_rate"], setting["kl_coef"]) for kl, setting in chosen[algorithm].items()}


def setting_for_questions(group: str, algorithm: str) -> tuple[float, float]:
    """That of the highest KL up to theirs that a setting was chosen for."""
    chosen = settings(group, algorithm)
    return chosen[max(kl for kl in chosen if kl <= QUESTIONS_KL)]


def run_with(group: str, task: str, algorithm: str, setting: tuple[float, float], seed: int, own: float) -> Run:
    rate, kl_coef = setting
    run = replace(basic_run(group, task, algorithm, rate, seed), kl_coef=kl_coef, own_parameter=own)
    return in_fours(run) if algorithm in BY_GROUPS else run


def in_fours(run: Run) -> Run:
    """Four responses to half as many prompts as pairs have: equally many responses."""
    return replace(run, responses_per_prompt=4, prompts_per_update=PROMPTS_PER_UPDATE[RETUNED] // 2)


def trial(group: str, algorithm: str, setting: tuple[float, float], own: float) -> Iterator[Run]:
    """On every selection seed."""
    for task, seed in zip(TASKS[group], SELECTION_SEEDS[group], strict=True):
        yield run_with(group, task, algorithm, setting, seed, own)


def own_parameters(group: str) -> Iterator[Run]:
    """REBEL's eta and GSPO's clip range, at the middle rate and KL coefficient."""
    for algorithm, trials in OWN_TRIALS.items():
        for own in trials:
            yield from trial(group, algorithm, (TRIAL_RATES[algorithm][0], KL_COEFS[algorithm][MIDDLE]), own)


def trial_rates(group: str) -> Iterator[Run]:
    """Every algorithm with three learning rates at the middle KL coefficient."""
    for number in range(3):
        for algorithm in EVERYONE:
            setting = TRIAL_RATES[algorithm][number], KL_COEFS[algorithm][MIDDLE]
            yield from trial(group, algorithm, setting, own_parameter(group, algorithm))


def trial_kl_coefs(group: str) -> Iterator[Run]:
    """Every algorithm with the other KL coefficients, at the rate that was best for the KL of the questions."""
    for number in (LARGE, SMALL):
        for algorithm in EVERYONE:
            rate, _ = setting_for_questions(group, algorithm)
            setting = rate, KL_COEFS[algorithm][number]
            yield from trial(group, algorithm, setting, own_parameter(group, algorithm))


def envelope(group: str) -> Iterator[Run]:
    """Every algorithm with the settings that were chosen for any KL; seeds of both tasks by turns."""
    half = len(SEEDS) // 2
    for seed in [seed for pair in zip(SEEDS[:half], SEEDS[half:], strict=True) for seed in pair]:
        for algorithm in EVERYONE:
            for setting in dict.fromkeys(settings(group, algorithm).values()):
                own = own_parameter(group, algorithm)
                yield run_with(group, task_of(group, seed), algorithm, setting, seed, own)


def groups_of_four(group: str) -> Iterator[Run]:
    """Every algorithm with four responses to half as many prompts, at its setting for the KL of the questions."""
    for run in envelope(group):
        if setting_for_questions(group, run.algorithm) == (run.learning_rate, run.kl_coef):
            yield in_fours(run)
