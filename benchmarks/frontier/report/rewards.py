"""What rewards may add: offsets of several sizes, and a scale that differs between prompts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.frontier.report import measures
from benchmarks.frontier.report.figures import Mark, Row, draw
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import rewards
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.tuned_arms import arm


def pairs() -> Iterator[tuple[Run, Run]]:
    """Joint P3O against PPO under offsets; with factors joint P3O against all, and all against themselves without."""
    joint = arm("joint")
    yield from ((joint, rewards.ppo(sd, rate)) for sd in rewards.DEVIATIONS for rate in rewards.PPO_RATES)
    yield joint, arm("ppo_centred")
    for one in rewards.scales():
        first = arm("joint", one.responses_per_prompt, reward_spread=one.reward_spread)
        if one != first:
            yield first, one
        if one.reward_spread:
            yield one, replace(one, reward_spread=0.0)


def different_weights(study: Study) -> list[list[str]]:
    """How many different weights an algorithm ends with under its offsets, also none; 1 is bit for bit. Header first.

    One machine made these runs: another one rounds otherwise.
    """
    lines = [["algorithm", "offsets", "different weights"]]
    planned = {run.name for run in rewards.offset_bits()}
    runs = study.records.runs
    for algorithm, ran in runs[runs["name"].isin(planned)].groupby("algorithm", sort=False):
        lines.append([measures.NAMES[algorithm], str(len(ran)), str(ran["sha256"].nunique())])
    return lines


MARKS = {"plain": Mark("o", "plain rewards", filled=False), "scaled": Mark("D", "a factor for every prompt")}


def scales_figure(study: Study, path: Path) -> bool:
    """What every algorithm reaches with a factor that differs between prompts, and without."""
    panels = {}
    for responses in (4, 16):
        start = arm("joint", responses)
        plain = [one for one in rewards.scales() if one.responses_per_prompt == responses and not one.reward_spread]
        panels[f"{responses} responses to a prompt"] = [
            Row(
                one,
                {
                    "plain": measures.difference(study, (one, start), "end"),
                    "scaled": measures.difference(study, (replace(one, reward_spread=rewards.SPREAD), start), "end"),
                },
            )
            for one in plain
        ]
    title = f"Reward − {BETA:g} KL after training on rewards with a log-normal factor (σ 1) for every prompt"
    return draw(panels, MARKS, minus="joint P3O with plain rewards", title=title, path=path)
