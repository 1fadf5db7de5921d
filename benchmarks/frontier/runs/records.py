"""The runs as they were recorded, and the choice of those that a table or a figure is about."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.frontier.plan import DOCSTRINGS, KL_COEFS, OFFSET_SD, SEEDS, Run, group_of
from fastp3o.evaluation.matched_kl import Seed, gain_at_kl

FOLDER = Path(__file__).parent
RESULTS = FOLDER.parent / "results" / "frontier"

Record = dict[str, Any]  # a line of runs.jsonl: the fields of plan.Run with seconds, sha256 and evaluations
OFFSETS = ("none", "learnable", "unlearnable")
# By what a run is judged: the reward it was trained on and, where the task has one, the utility behind that reward.
OUTCOMES = {"languages": {"reward": "proxy", "gold": "gold"}, DOCSTRINGS: {"reward": "proxy"}}


class Arm(NamedTuple):
    """Runs that differ in nothing but task and seed. A learning rate or KL coefficient of None is the main one."""

    algorithm: str
    offset: str = "none"
    learning_rate: float | None = None
    kl_coef: float | None = None
    responses_per_prompt: int = 2


class Study(NamedTuple):
    """All runs with the chosen learning rates, group -> algorithm -> rate."""

    runs: list[Record]
    rates: dict[str, dict[str, float]]

    def rate(self, group: str, algorithm: str) -> float | None:
        """The chosen one; of variants of joint clipping that of joint."""
        return self.rates.get(group, {}).get(algorithm.partition("-")[0])

    def runs_of(self, group: str, arm: Arm, *, selection: bool = False) -> list[Record]:
        """On the seeds of the results, or on those that learning rates were chosen on; empty where there are none."""
        wanted = arm._asdict() | {"offset_sd": 0.0 if arm.offset == "none" else OFFSET_SD}
        if arm.learning_rate is None:
            wanted["learning_rate"] = self.rate(group, arm.algorithm)
        if arm.kl_coef is None:
            wanted["kl_coef"] = KL_COEFS[arm.algorithm.partition("-")[0]][0]
        return [
            run
            for run in self.runs
            if group_of(run["task"]) == group
            and (run["seed"] not in SEEDS) == selection
            and all(run[name] == value for name, value in wanted.items())
        ]


def load(results: Path = RESULTS, settings: Path = FOLDER / "settings.json") -> Study:
    """What has been recorded, be it nothing yet. ValueError where a run was recorded twice."""
    runs = [json.loads(line) for line in read(results / "runs.jsonl").splitlines()]
    seen = set()
    for run in runs:
        if name_of(run) in seen:
            raise ValueError(f"{results / 'runs.jsonl'} has two runs {name_of(run)}")
        seen.add(name_of(run))
    return Study(runs, json.loads(read(settings) or "{}"))


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def name_of(run: Record) -> str:
    return Run(**{field: run[field] for field in Run.__dataclass_fields__}).name


def enough(count: int) -> bool:
    """Whether so many seeds speak for all: a comparison that most seeds never reach is one of the seeds that do."""
    return count >= 0.75 * len(SEEDS)


def by_seed(runs: list[Record]) -> dict[Seed, Record]:
    return {(run["task"], run["seed"]): run for run in runs}


def gains_at(runs: list[Record], kl: float, of: str) -> dict[Seed, float | None]:
    """The gain of each run at a KL in nats per response, None where the run has none there."""
    return {seed: gain_at_kl(run["evaluations"], kl, of) for seed, run in by_seed(runs).items()}


def final_gain(run: Record, of: str) -> float:
    return run["evaluations"][-1][of] - run["evaluations"][0][of]


def by_task(values: dict[Seed, float | None]) -> list[list[float]]:
    """The values there are, by task: the strata of an interval."""
    tasks = dict.fromkeys(task for task, _ in values)
    return [[value for (of, _), value in values.items() if of == task and value is not None] for task in tasks]
