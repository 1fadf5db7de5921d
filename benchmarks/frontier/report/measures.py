"""The ten languages: arms by their measures, paired differences between them, and how both are
written.

Measures of a run, rewards in standard deviations:

    end          reward − BETA KL after the last update, which training maximizes
    gain, gold   of the learned reward and of the true utility at a KL of EQUAL_KL, NaN if it is not reached
    final_kl     in nats per response
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pandas import DataFrame

from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.records import Records
from benchmarks.frontier.runs.tuned_arms import RESULTS
from benchmarks.goals import NOT_MEASURED
from fastp3o.evaluation.matched_kl import Estimate, Seed, gain_at_kl, interval, paired_difference

EQUAL_KL = 1.0
MEASURES = {
    "end": f"reward − {BETA:g} KL",
    "gain": f"gain at KL {EQUAL_KL:g}",
    "gold": "gold there",
    "final_kl": "final KL",
}
NAMES = {
    "joint": "P3O, joint",
    "separate": "P3O, separate",
    "none": "P3O, no clipping",
    "token": "P3O, tokens",
    "ppo": "PPO",
    "dpo": "online DPO",
    "rloo": "RLOO",
    "rloo-response": "RLOO, responses clipped",
    "rloo-token": "RLOO, tokens clipped",
    "grpo": "GRPO, k3",
    "grpo-k1": "GRPO, k1",
    "dr_grpo": "Dr. GRPO, k3",
    "dr_grpo-k1": "Dr. GRPO, k1",
    "dapo": "DAPO, k3",
    "dapo-k1": "DAPO, k1",
    "gspo": "GSPO",
    "rebel": "REBEL",
    "oapl": "OAPL",
    "vespo": "VESPO",
    "copg": "CoPG",
    "ppo-lambda-1": "PPO, λ 1",
    "ppo_centred": "PPO less the prompt's mean",
}
# An arm's label -> a pair of arms whose difference it is.
Pairs = Mapping[tuple[str, ...], tuple[Run, Run]]


@dataclass(frozen=True, eq=False)
class Study:
    """All recorded runs, and the choices of `tuned_arms.chosen`."""

    records: Records
    chosen: dict[str, dict] = field(default_factory=dict)


def measured(study: Study, arm: Run) -> DataFrame:
    """MEASURES of an arm's runs on the languages of the results, by seed."""
    rate = rate_of(study, arm)
    planned = (
        []
        if rate is None
        else [replace(arm, task=name, seed=seed, learning_rate=rate) for seed, name in RESULTS]
    )
    return measures(study.records, planned)


def rate_of(study: Study, arm: Run) -> float | None:
    """The arm's own learning rate if it has one, otherwise the one that was chosen for it."""
    return arm.learning_rate or study.chosen.get("rates", {}).get(arm.name)


def measures(records: Records, runs: Iterable[Run]) -> DataFrame:
    """By seed; runs that are not recorded are left out."""
    found = {run.seed: records.histories[run.name] for run in runs if run.name in records.histories}
    rows = {
        seed: {
            "end": history[-1]["objective"],
            "gain": gain_at_kl(history, EQUAL_KL),
            "gold": gain_at_kl(history, EQUAL_KL, "gold"),
            "final_kl": history[-1]["kl"],
        }
        for seed, history in found.items()
    }
    return DataFrame.from_dict(rows, orient="index", columns=list(MEASURES))


def name_of(arm: Run) -> str:
    """As in figures and tables: the algorithm with its own parameter."""
    return NAMES[arm.algorithm] + (f" {arm.own_parameter:g}" if arm.own_parameter else "")


def difference(study: Study, pair: tuple[Run, Run], measure: str) -> Estimate | None:
    """Over the languages on which both have it."""
    return paired_difference(*(by_seed(measured(study, arm), measure) for arm in pair))


def by_seed(found: DataFrame, measure: str) -> dict[Seed, float]:
    """Languages are not strata: one more would be another of their kind, so intervals are over
    languages.
    """
    return {("", seed): float(value) for seed, value in found[measure].dropna().items()}


def levels(study: Study, arms: Iterable[Run]) -> list[list[str]]:
    """One line an arm that has run. Header first."""
    lines = [["arm", "learning rate", *MEASURES.values()]]
    for arm in dict.fromkeys(arms):
        found = measured(study, arm)
        if not found.empty:
            means = [interval(by_seed(found, name)) for name in MEASURES]
            shown = ["" if one is None else estimate(one) for one in means]
            lines.append([described(arm), rate(rate_of(study, arm)), *shown])
    return lines


def differences(study: Study, pairs: Iterable[tuple[Run, Run]]) -> list[list[str]]:
    """One line a pair that has run, the second one's measures subtracted from the first one's.
    Header first.
    """
    judged = ("end", "gain")
    lines = [["first", "minus", *(MEASURES[name] for name in judged)]]
    for first, second in dict.fromkeys(pairs):
        found = [difference(study, (first, second), name) for name in judged]
        if found[0] is not None:
            lines.append(
                [
                    described(first),
                    described(second),
                    *(estimate(one, signed=True) for one in found),
                ]
            )
    return lines


def described(arm: Run) -> str:
    """An arm with all in which it is not the usual one."""
    parts = [name_of(arm), f"K {arm.responses_per_prompt}"]
    parts += [f"β {arm.kl_coef:g}"] if arm.kl_coef != BETA else []
    parts += [f"{arm.rounds_ahead} updates old, {arm.correction}"] if arm.rounds_ahead else []
    parts += [f"offset {arm.offset_sd:g}"] if arm.offset_sd else []
    parts += [f"factors {arm.reward_spread:g}"] if arm.reward_spread else []
    parts += [f"{arm.updates} updates"] if arm.updates else []
    parts += [f"{arm.inner_epochs} passes"] if arm.inner_epochs else []
    parts += [f"critic {rate(arm.critic_learning_rate)}"] if arm.critic_learning_rate else []
    parts += [f"value clip {arm.value_clip_range:g}"] if arm.value_clip_range else []
    parts += [f"{arm.kl_per_update:g} nats an update from"] if arm.kl_per_update else []
    return ", ".join(parts + ([f"rate {rate(arm.learning_rate)}"] if arm.learning_rate else []))


def number(value: float, *, signed: bool = False) -> str:
    """Two decimals, with a proper minus."""
    return (f"{value:+z.2f}" if signed else f"{value:z.2f}").replace("-", "−")


def estimate(found: Estimate | None, *, signed: bool = False) -> str:
    """`mean [low, high] (seeds)`, without the interval if there are too few seeds for one."""
    if found is None:
        return NOT_MEASURED
    mean, low, high = (number(value, signed=signed) for value in found[:3])
    return f"{mean}{f' [{low}, {high}]' if math.isfinite(found.low) else ''} ({found.count})"


def rate(value: float | None) -> str:
    """3e-4 rather than 0.0003 or 3e-04."""
    if value is None:
        return NOT_MEASURED
    digits, exponent = f"{value:.2e}".split("e")
    return f"{float(digits):g}e{int(exponent)}"
