"""Runs that vary one setting at a time from the tuned ones, and K at equal cost."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.frontier.runs.plan import SEEDS, Run, task_of
from benchmarks.frontier.runs.tuning import run_with, setting_for_questions
from benchmarks.frontier.tasks.groups import RETUNED, TASKS

REWARD_FACTORS = (0.1, 1.0, 10.0)
CLIP_RANGES = {
    **dict.fromkeys(("joint", "separate", "ppo"), (0.05, 0.1, 0.2, 0.5, 1.0)),
    "grpo": (0.05, 0.1, 0.2, 0.5),  # its ratios count down to 1 − ε, above 0
}

# joint-difference is P3O's default: rewards divided by the running deviation of their differences.
SCALED = ("joint", "joint-difference", "ppo", "grpo", "rloo")
RIVALS = ("joint", "ppo", "dpo")
# Factors on the rate that was chosen for the small policy, as larger ones want a lower rate. The whole rate runs on
# half of the seeds.
SIZE_RATES = {"size_1m": (0.5, 1.0), "size_6m": (0.25, 0.5)}

# Responses to each prompt -> prompts of an update: equally many computed tokens within a twentieth, as long prompts
# have 122 tokens and responses about 13 in the course of a run.
EQUAL_TOKENS = {2: 64, 4: 52, 8: 40, 16: 28}
MANY_RESPONSES = dict.fromkeys(("joint", "rloo", "grpo", "ppo", "joint_once"), tuple(EQUAL_TOKENS)) | {
    "ppo_narrow": (2, 16)
}
LONG_KL_COEF = 0.1


def tuned_run(group: str, algorithm: str, seed: int) -> Run:
    """The algorithm's run with the setting that RETUNED chose."""
    base = algorithm.partition("-")[0]
    setting = setting_for_questions(RETUNED, base)
    return replace(run_with(RETUNED, task_of(group, seed), base, setting, seed), algorithm=algorithm)


def clip_range(group: str) -> Iterator[Run]:
    """Clip ranges from 0.05 to 1."""
    for seed in SEEDS:
        for algorithm, clips in CLIP_RANGES.items():
            for clip in clips:
                yield replace(tuned_run(group, algorithm, seed), own_parameter=0.0 if clip == 0.2 else clip)


def reward_factor(group: str) -> Iterator[Run]:
    """Rewards multiplied by 0.1 and by 10. DPO, which only reads which reward is higher, runs on one
    seed per task, as a proof.
    """
    for seed in SEEDS:
        proof = ("dpo",) if seed % (len(SEEDS) // 2) == 0 else ()
        for algorithm in (*SCALED, *proof):
            for factor in REWARD_FACTORS:
                yield replace(tuned_run(group, algorithm, seed), reward_factor=factor)


def wrong_labels(group: str) -> Iterator[Run]:
    """Runs with reward models of more wrong labels, by the group."""
    for seed in SEEDS:
        for algorithm in RIVALS:
            yield tuned_run(group, algorithm, seed)


def sizes(group: str) -> Iterator[Run]:
    """Runs with larger policies, by the group."""
    for factor in SIZE_RATES[group]:
        for seed in SEEDS if factor < 1 else SEEDS[::2]:
            for algorithm in RIVALS:
                run = tuned_run(group, algorithm, seed)
                yield replace(run, learning_rate=factor * run.learning_rate)


def equal_cost(group: str) -> Iterator[Run]:
    """2, 4, 8 and 16 responses to each of fewer and fewer prompts, so that an update computes equally many tokens."""
    half = len(SEEDS) // 2
    for pair in zip(SEEDS[:half], SEEDS[half:], strict=True):
        for algorithm, asked in MANY_RESPONSES.items():
            rate = setting_for_questions(RETUNED, algorithm).learning_rate
            for responses in asked:
                for task, seed in zip(TASKS[group], pair, strict=True):
                    yield Run(
                        task,
                        algorithm,
                        rate,
                        LONG_KL_COEF,
                        seed,
                        responses_per_prompt=responses,
                        prompts_per_update=EQUAL_TOKENS[responses],
                    )
