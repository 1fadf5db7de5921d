"""The table at the top of README.md: a question, its answer in words, the number, and where it was
measured.
"""

from pathlib import Path
from typing import NamedTuple

from benchmarks.frontier.report import (
    arithmetic,
    bands,
    circles,
    kl_coefs,
    measures,
    real_model,
    stale,
)
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.report.stale import OLDEST
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.rewards import PPO_RATES, ppo, scales
from benchmarks.frontier.runs.settings import two_responses
from benchmarks.frontier.runs.tuned_arms import arm
from benchmarks.goals import NOT_MEASURED
from benchmarks.markdown import markdown, write_between
from fastp3o.evaluation.matched_kl import Estimate

README = Path(__file__).parents[1] / "README.md"
END = f"reward − {BETA:g} KL"


class Verdict(NamedTuple):
    """`estimate` is P3O minus `rival`, None if it was not measured."""

    question: str
    rival: str
    estimate: Estimate | None


def write(study: Study) -> None:
    for name, table_of_page in page_tables(study).items():
        write_between(README, name, markdown(table_of_page))


def page_tables(study: Study) -> dict[str, list[list[str]]]:
    """All of README.md, by the names of their markers."""
    return {
        "verdicts": table(study),
        "beta": kl_coefs.table(study),
        "sums": arithmetic.table(),
        "circles": circles.table(),
        "differences of circles": circles.differences(),
        "reward models of circles": circles.reward_models(),
        "bands": bands.table(),
        "bands of a real model": bands.real_table(),
        "human preferences": real_model.table("human_preferences"),
        "differences of human preferences": real_model.differences("human_preferences"),
        "film reviews": real_model.table("film_reviews"),
        "differences of film reviews": real_model.differences("film_reviews"),
    }


def verdicts(study: Study) -> list[Verdict]:
    """At most eight."""
    # Joint P3O, which no offset moves, against PPO at the rate that is best for it there.
    offset = against_highest(study, [(arm("joint"), ppo(1.0, rate)) for rate in PPO_RATES])
    joint, other = two_responses()
    pairs = against_highest(study, [(joint, other)])
    # The best P3O of the selection languages against the rival with the highest mean on those of
    # the results, which is a choice in the rival's favor.
    by_lag = [
        Verdict(
            f"{name}, {K} responses{more}", *against_highest(study, stale.rivals(study, lag, K))
        )
        for lag, name, more in (
            (0, "fresh rollouts", " per prompt"),
            (OLDEST, f"rollouts {OLDEST} updates old", ""),
        )
        for K in (4, 16)
    ]
    return [
        Verdict("an offset of one deviation per prompt, PPO alone", *offset),
        *(
            Verdict(f"a factor per prompt (σ 1), {K} responses", *under_scales(study, K))
            for K in (4, 16)
        ),
        Verdict("fresh rollouts, 2 responses per prompt", *pairs),
        *by_lag,
    ]


def table(study: Study) -> list[list[str]]:
    """Header first."""
    lines = [["where P3O differs", "answer", f"{END}: P3O minus the best other"]]
    for verdict in verdicts(study):
        found = verdict.estimate
        number = (
            NOT_MEASURED
            if found is None
            else f"{measures.estimate(found, signed=True)}, {verdict.rival}"
        )
        lines.append([verdict.question, reading(found), number])
    return lines


def reading(estimate: Estimate | None) -> str:
    """What the interval says."""
    if estimate is None:
        return NOT_MEASURED
    if estimate.low <= 0 <= estimate.high:
        return "no evidence of a difference"
    by = "" if abs(estimate.mean) >= 0.05 else ", by little"
    return f"P3O is {'ahead' if estimate.mean > 0 else 'behind'}{by}"


def against_highest(study: Study, pairs: list[tuple[Run, Run]]) -> tuple[str, Estimate | None]:
    means = {pair: measures.measured(study, pair[1])["end"].mean() for pair in pairs}
    known = {pair: mean for pair, mean in means.items() if mean == mean}
    if not known:
        return "", None
    best = max(known, key=known.__getitem__)
    return measures.name_of(best[1]), measures.difference(study, best, "end")


def under_scales(study: Study, responses: int) -> tuple[str, Estimate | None]:
    """Joint P3O as it is against the best other algorithm, all under the same factors."""
    arms = [one for one in scales() if one.reward_spread and one.responses_per_prompt == responses]
    first = next(one for one in arms if one.algorithm == "joint")
    return against_highest(
        study, [(first, one) for one in arms if not one.algorithm.startswith("joint")]
    )
