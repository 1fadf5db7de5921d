"""The recorded runs that a table or a figure shows, as frames with one row per seed."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pandas import DataFrame, Series

from benchmarks.frontier.runs import tuned_arms
from benchmarks.frontier.runs.plan import KL_COEFS, OFFSET_SD, SEEDS, chosen_rates
from benchmarks.frontier.runs.records import RESULTS, SEED, Records, load
from benchmarks.frontier.runs.tuning import tuned
from benchmarks.frontier.tasks.groups import DOCSTRINGS, GROUPS

# The outcomes that a run is judged by: the reward it was trained on and, if the task has one, the true utility.
OUTCOMES = {group: {"reward": "proxy", "gold": "gold"} for group in GROUPS} | {DOCSTRINGS: {"reward": "proxy"}}


class Arm(NamedTuple):
    """Runs that differ in nothing but task and seed. A learning rate or KL coefficient of None is the chosen one."""

    algorithm: str
    offset: str = "none"
    learning_rate: float | None = None
    kl_coef: float | None = None
    responses_per_prompt: int = 2
    own_parameter: float = 0.0
    reward_factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Study:
    """All runs, the chosen learning rates (group -> algorithm -> rate), and the choices of `tuning.tuned` and of
    `tuned_arms.chosen`.
    """

    records: Records
    rates: dict[str, dict[str, float]]
    tuned: dict[str, dict[str, dict]] = field(default_factory=dict)
    tuned_arms: dict[str, dict] = field(default_factory=dict)

    def chosen_rate(self, group: str, algorithm: str) -> float | None:
        """The rate chosen for the algorithm; variants of joint clipping have joint's. None if none was chosen."""
        return self.rates.get(group, {}).get(algorithm.partition("-")[0])

    def runs_of(self, group: str, arm: Arm, *, selection: bool = False) -> DataFrame:
        """An arm's runs on the seeds of the results, or on the selection seeds; indexed by task and seed."""
        if arm.learning_rate is None:
            arm = arm._replace(learning_rate=self.chosen_rate(group, arm.algorithm))
        if arm.kl_coef is None:
            arm = arm._replace(kl_coef=KL_COEFS[arm.algorithm.partition("-")[0]][0])
        offset_sd = 0.0 if arm.offset == "none" else OFFSET_SD
        runs = self.arms.get((group, *arm, offset_sd, selection))
        return self.records.runs[:0].set_index(SEED) if runs is None else runs

    @cached_property
    def arms(self) -> dict[tuple, DataFrame]:
        """Runs by group, the fields of Arm, the offset's standard deviation, and whether the seed is for selection."""
        runs = self.records.runs.assign(selection=~self.records.runs["seed"].isin(SEEDS))
        return dict(list(runs.set_index(SEED).groupby(["group", *Arm._fields, "offset_sd", "selection"], sort=False)))

    def gains(self, group: str, arm: Arm, kl: float, outcome: str) -> Series:
        """An arm's gains at a KL (nats per response), by task and seed; NaN if a run has none there."""
        return self.records.at_kl(self.runs_of(group, arm), kl, outcome)

    def evaluations_of(self, runs: DataFrame) -> DataFrame:
        """One row per evaluation, indexed by the run's name and the update."""
        evaluations = self.records.evaluations
        return evaluations[evaluations["run"].isin(runs["name"])].set_index(["run", "step"])


def load_study() -> Study:
    """The committed records and choices."""
    return Study(load(RESULTS / "runs.jsonl"), chosen_rates(), tuned(), tuned_arms.chosen())


def enough(count: int) -> bool:
    """Whether this many seeds speak for all. A comparison that only few seeds reach would be one of those seeds."""
    return count >= 0.75 * len(SEEDS)
