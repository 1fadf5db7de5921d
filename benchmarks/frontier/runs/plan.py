"""The fields of a run, and every run of the first comparison, by the question that it answers.

Arms of a comparison share task and seed: prompts, order and sampling noise are the same.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES, RETUNED, TASKS

ALGORITHMS = ("joint", "separate", "none", "ppo", "dpo")
CLIPPINGS = ("joint", "separate", "none")
NEWER = ("rloo", "grpo", "dr_grpo", "dapo", "gspo", "rebel")
# Joint clipping with one pass over a round, like RLOO; PPO with half its clip range, which was better for it.
VARIANTS = ("joint_once", "ppo_narrow")
PUBLISHED = (*ALGORITHMS, *NEWER)
EVERYONE = (*PUBLISHED, *VARIANTS)

# Trial learning rates, the same for every algorithm, on seeds that no table of results uses.
LEARNING_RATES = {
    LANGUAGES: (7.5e-5, 1.5e-4, 3e-4, 6e-4, 1.2e-3),
    DOCSTRINGS: (1.9e-5, 3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4),
}
SELECTION_SEEDS = {LANGUAGES: (100, 101), RETUNED: (100, 101), DOCSTRINGS: (100,)}
SEEDS = tuple(range(8))
HIGH_LEARNING_RATE = 1.2e-3
BETA = 0.1  # the KL coefficient that most comparisons share, in standard deviations of the reward per nat
OFFSET_SD = 10.0

# The weight of the KL penalty, in standard deviations of the reward per nat; for DPO its own beta.
KL_COEFS = dict.fromkeys(EVERYONE, (0.03, 0.1, 0.3)) | {"dpo": (0.1, 0.3, 1.0)}

PROMPTS_PER_UPDATE = {LANGUAGES: 64, RETUNED: 64, DOCSTRINGS: 32}

# The chosen learning rates: group -> algorithm -> rate.
SETTINGS = Path(__file__).parent / "settings.json"

# Fields that the first recorded runs lack.
LATER = ("own_parameter", "reward_factor", "rounds_ahead", "correction", "inner_epochs", "reward_spread", "updates")


@dataclass(frozen=True)
class Run:
    """One training run; equal runs give equal weights on the same machine."""

    task: str
    algorithm: str  # P3O's clipping, or another of EVERYONE; joint-absolute: joint with reward_scaling absolute
    learning_rate: float
    kl_coef: float
    seed: int
    offset: str = "none"  # none, learnable or unlearnable
    offset_sd: float = 0.0  # standard deviation over prompts, in standard deviations of the reward
    responses_per_prompt: int = 2
    prompts_per_update: int = 64
    own_parameter: float = 0.0  # the algorithm's entry in one_run.OWN_PARAMETERS; 0: its default
    reward_factor: float = 1.0  # rewards are multiplied by it
    rounds_ahead: int = 0  # updates between the policy that sampled and the one that trains
    correction: str = "none"  # of stale rollouts, one of one_run.CORRECTIONS
    inner_epochs: int = 0  # passes over a round; 0: the algorithm's default
    updates: int = 0  # 0: those of the task
    reward_spread: float = 0.0  # standard deviation of the log of a factor that each prompt's rewards have

    @property
    def name(self) -> str:
        """All fields in their order; LATER ones only if they are not the default."""
        values = asdict(self)
        later = {field: values.pop(field) for field in LATER}
        named = [written(value) for value in values.values()]
        return "-".join(
            named + [f"{field}={written(value)}" for field, value in later.items() if value != getattr(Run, field)]
        )


def written(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def task_of(group: str, seed: int) -> str:
    """Half of the seeds run on each language."""
    tasks = TASKS[group]
    return tasks[seed // (len(SEEDS) // len(tasks)) % len(tasks)]


def chosen_rates() -> dict[str, dict[str, float]]:
    return json.loads(SETTINGS.read_text()) if SETTINGS.exists() else {}


def rates(group: str) -> Iterator[Run]:
    """All learning rates of every algorithm on the selection seeds."""
    for number, seed in enumerate(SELECTION_SEEDS[group]):
        task = TASKS[group][number % len(TASKS[group])]
        for algorithm in ALGORITHMS:
            for rate in LEARNING_RATES[group]:
                yield basic_run(group, task, algorithm, rate, seed)


def basic_run(group: str, task: str, algorithm: str, rate: float, seed: int) -> Run:
    """The run that the others of the first comparison vary."""
    prompts = PROMPTS_PER_UPDATE[group]
    return Run(task, algorithm, rate, KL_COEFS[algorithm][0], seed, prompts_per_update=prompts)


def algorithms(group: str) -> Iterator[Run]:
    """Every algorithm at its chosen rate. ValueError if none was chosen."""
    chosen = chosen_rates()
    if group not in chosen:
        raise ValueError(f"{SETTINGS} has no learning rates for {group}: run the part `rates` first")
    for seed in SEEDS:
        for algorithm in ALGORITHMS:
            yield basic_run(group, task_of(group, seed), algorithm, chosen[group][algorithm], seed)


def offsets(group: str) -> Iterator[Run]:
    """An offset that depends on the prompt: both kinds for PPO, the unlearnable one at two lower rates too, as noise
    may want slower steps; one for joint clipping, and one for the others on one seed per task, as a proof.
    """
    for run in algorithms(group):
        kinds = {"ppo": ("unlearnable", "learnable"), "joint": ("unlearnable",)}.get(run.algorithm, ())
        if run.seed % (len(SEEDS) // 2) == 0:
            kinds = kinds or ("unlearnable",)
        for kind in kinds:
            yield replace(run, offset=kind, offset_sd=OFFSET_SD)
        if run.algorithm == "ppo":
            for rate in [rate for rate in LEARNING_RATES[group] if rate < run.learning_rate][-2:]:
                yield replace(run, learning_rate=rate, offset="unlearnable", offset_sd=OFFSET_SD)


def scaling(group: str) -> Iterator[Run]:
    """Joint clipping with rewards divided by the deviation of absolute scores, under an offset and without."""
    for run in algorithms(group):
        if run.algorithm == "joint":
            yield replace(run, algorithm="joint-absolute")
            yield replace(run, algorithm="joint-absolute", offset="unlearnable", offset_sd=OFFSET_SD)


def clipping(group: str) -> Iterator[Run]:
    """P3O's three clippings at a high learning rate."""
    for run in algorithms(group):
        if run.algorithm in CLIPPINGS:
            yield replace(run, learning_rate=HIGH_LEARNING_RATE)


def responses(group: str) -> Iterator[Run]:
    """Four responses to half as many prompts: equally many generated tokens."""
    for run in algorithms(group):
        if run.algorithm == "joint":
            yield replace(run, responses_per_prompt=4, prompts_per_update=run.prompts_per_update // 2)


def kl_coefs(group: str) -> Iterator[Run]:
    """Every algorithm with the other KL coefficients, the largest first: if stopped, the extremes are there."""
    for number in (2, 1):
        for run in algorithms(group):
            yield replace(run, kl_coef=KL_COEFS[run.algorithm][number])


def other_rates(group: str) -> Iterator[Run]:
    """Every algorithm at the rates on either side of the chosen one, on the seeds of the results."""
    for run in algorithms(group):
        for rate in neighbours(group, run.learning_rate):
            yield replace(run, learning_rate=rate)


def neighbours(group: str, rate: float) -> list[float]:
    """The next lower and the next higher trial rate, if there is one."""
    trials = LEARNING_RATES[group]
    place = trials.index(rate)
    return [*trials[max(place - 1, 0) : place], *trials[place + 1 : place + 2]]
