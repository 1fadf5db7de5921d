"""What rewards may add: offsets of several sizes, and a scale that differs between prompts."""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.frontier.report import measures
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import rewards
from benchmarks.frontier.runs.plan import Run
from benchmarks.frontier.runs.tuned_arms import arm


def pairs() -> Iterator[tuple[Run, Run]]:
    """Joint P3O against PPO under offsets; with factors joint P3O against all, and all against
    themselves without.
    """
    joint = arm("joint")
    yield from (
        (joint, rewards.ppo(sd, rate)) for sd in rewards.DEVIATIONS for rate in rewards.PPO_RATES
    )
    yield joint, arm("ppo_centred")
    for one in rewards.scales():
        first = arm("joint", one.responses_per_prompt, reward_spread=one.reward_spread)
        if one != first:
            yield first, one
        if one.reward_spread:
            yield one, replace(one, reward_spread=0.0)


def different_weights(study: Study) -> list[list[str]]:
    """How many different weights an algorithm ends with under its offsets, also none; 1 is bit for
    bit. Header first.

    One machine made these runs: another one rounds otherwise.
    """
    lines = [["algorithm", "offsets", "different weights"]]
    planned = {run.name for run in rewards.offset_bits()}
    runs = study.records.runs
    for algorithm, ran in runs[runs["name"].isin(planned)].groupby("algorithm", sort=False):
        lines.append([measures.NAMES[algorithm], str(len(ran)), str(ran["sha256"].nunique())])
    return lines
