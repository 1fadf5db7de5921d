"""Runs that tune every algorithm by the same rules, over learning rate and KL coefficient, and runs at the result.

Algorithms that use a group's mean and deviation take four responses to half as many prompts: with two responses GRPO's
advantages are only signs. The others take pairs, and groups of four for comparison.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.frontier.runs.plan import (
    EVERYONE,
    KL_COEFS,
    PROMPTS_PER_UPDATE,
    PUBLISHED,
    SEEDS,
    SELECTION_SEEDS,
    Run,
    basic_run,
    task_of,
)
from benchmarks.frontier.tasks.groups import RETUNED, TASKS

BY_GROUPS = ("grpo", "dr_grpo", "dapo", "gspo")

# Trials on the selection seeds, the middle first. RLOO and joint_once make one pass over a round, a fourth of the steps
# of the others; DPO's steps are larger.
TRIAL_RATES = dict.fromkeys(EVERYONE, (3e-4, 6e-4, 1.5e-4)) | {
    "rloo": (6e-4, 1.2e-3, 3e-4),
    "joint_once": (6e-4, 1.2e-3, 3e-4),
    "dpo": (1.5e-4, 3e-4, 7.5e-5),
}
OWN_TRIALS = {"rebel": (1.0, 3.0, 10.0), "gspo": (0.01, 0.03, 0.003)}
MIDDLE = 1  # of an algorithm's KL_COEFS
LARGE, SMALL = 2, 0

# The KLs (nats per response) for which settings are chosen, and the one whose settings the questions vary.
ENVELOPE_KLS = (1.0, 2.0)
QUESTIONS_KL = 2.0

# Choices of the selection seeds, by group: "settings" -> algorithm -> KL -> the fields of Setting, and before them
# "own_parameters" -> algorithm -> KL -> value.
TUNED = Path(__file__).parent / "tuned.json"


class Setting(NamedTuple):
    """One combination that is tried of an algorithm's settings."""

    learning_rate: float
    kl_coef: float
    own_parameter: float = 0.0  # as in Run


def tuned() -> dict:
    return json.loads(TUNED.read_text()) if TUNED.exists() else {}


def own_parameters_of(group: str, algorithm: str) -> list[float]:
    """The values chosen for any KL; 0, the default, for algorithms without one. ValueError if none was chosen."""
    if algorithm not in OWN_TRIALS:
        return [0.0]
    chosen = tuned().get(group, {}).get("own_parameters", {})
    if algorithm not in chosen:
        raise ValueError(f"{TUNED} has no parameter of {algorithm} for {group}: run the part `own_parameters` first")
    return list(dict.fromkeys(chosen[algorithm].values()))


def settings(group: str, algorithm: str) -> dict[float, Setting]:
    """The chosen settings by KL, lowest first. ValueError if nothing was chosen."""
    chosen = tuned().get(group, {}).get("settings", {})
    if algorithm not in chosen:
        raise ValueError(f"{TUNED} has no settings of {algorithm} for {group}: run the part `trial_rates` first")
    return {float(kl): Setting(**setting) for kl, setting in chosen[algorithm].items()}


def setting_for_questions(group: str, algorithm: str) -> Setting:
    """The setting for the highest KL, up to QUESTIONS_KL, that one was chosen for."""
    chosen = settings(group, algorithm)
    return chosen[max(kl for kl in chosen if kl <= QUESTIONS_KL)]


def run_with(group: str, task: str, algorithm: str, setting: Setting, seed: int) -> Run:
    run = replace(basic_run(group, task, algorithm, setting.learning_rate, seed), **setting._asdict())
    return in_fours(run) if algorithm in BY_GROUPS else run


def in_fours(run: Run) -> Run:
    """The run with four responses to half as many prompts: equally many responses."""
    return replace(run, responses_per_prompt=4, prompts_per_update=PROMPTS_PER_UPDATE[RETUNED] // 2)


def trial(group: str, algorithm: str, setting: Setting) -> Iterator[Run]:
    """The setting on every selection seed."""
    for task, seed in zip(TASKS[group], SELECTION_SEEDS[group], strict=True):
        yield run_with(group, task, algorithm, setting, seed)


def own_trial(algorithm: str, own: float) -> Setting:
    """The setting with this parameter, at the middle rate and KL coefficient."""
    return Setting(TRIAL_RATES[algorithm][0], KL_COEFS[algorithm][MIDDLE], own)


def own_parameters(group: str) -> Iterator[Run]:
    """Trials of REBEL's eta and GSPO's clip range."""
    for algorithm, trials in OWN_TRIALS.items():
        for own in trials:
            yield from trial(group, algorithm, own_trial(algorithm, own))


def trial_rates(group: str) -> Iterator[Run]:
    """Every algorithm with three learning rates at the middle KL coefficient."""
    for number in range(3):
        for algorithm in EVERYONE:
            for own in own_parameters_of(group, algorithm):
                setting = Setting(TRIAL_RATES[algorithm][number], KL_COEFS[algorithm][MIDDLE], own)
                yield from trial(group, algorithm, setting)


def trial_kl_coefs(group: str) -> Iterator[Run]:
    """Every algorithm with the other KL coefficients, at the rate that was best for the KL of the questions; with each
    parameter of its own at the rate for the highest KL that this was chosen for.
    """
    for number in (LARGE, SMALL):
        for algorithm in EVERYONE:
            by_own = {setting.own_parameter: setting for setting in settings(group, algorithm).values()}
            for setting in by_own.values():
                yield from trial(group, algorithm, setting._replace(kl_coef=KL_COEFS[algorithm][number]))


def envelope(group: str) -> Iterator[Run]:
    """Every algorithm with the settings that were chosen for any KL; seeds of both tasks in turns."""
    half = len(SEEDS) // 2
    for seed in [seed for pair in zip(SEEDS[:half], SEEDS[half:], strict=True) for seed in pair]:
        for algorithm in EVERYONE:
            for setting in dict.fromkeys(settings(group, algorithm).values()):
                yield run_with(group, task_of(group, seed), algorithm, setting, seed)


def groups_of_four(group: str) -> Iterator[Run]:
    """Four responses of published algorithms to half as many prompts, at their settings for the KL of the questions."""
    for seed in SEEDS:
        for algorithm in PUBLISHED:
            setting = setting_for_questions(group, algorithm)
            yield in_fours(run_with(group, task_of(group, seed), algorithm, setting, seed))
