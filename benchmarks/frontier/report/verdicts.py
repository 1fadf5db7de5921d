"""The table at the top of README.md: a question, its answer in words, the number, and where it was measured."""

from pathlib import Path
from typing import NamedTuple

from benchmarks.frontier.report import cells, equal_kl, many, objective, rewards, stale
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs.equal_kl import KLS
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.rewards import PPO_RATES, scales
from benchmarks.frontier.runs.tuned_arms import arm
from benchmarks.frontier.tasks.groups import RETUNED
from benchmarks.goals import NOT_MEASURED
from benchmarks.report import markdown, write_between
from fastp3o.evaluation.matched_kl import Estimate, paired_difference

README = Path(__file__).parents[1] / "README.md"
END = f"reward − {BETA:g} KL"
TEN = "ten languages"
HIGHER_KL = max(KLS)  # where P3O does worse than at the lower one


class Verdict(NamedTuple):
    """`estimate` is P3O minus `rival`, None if it was not measured."""

    question: str
    measure: str
    rival: str
    estimate: Estimate | None
    where: str


def write(study: Study) -> None:
    write_between(README, "verdicts", markdown(table(study)))


def verdicts(study: Study) -> list[Verdict]:
    """At most eight."""
    fresh = [
        Verdict(f"fresh rollouts, {K} responses per prompt", END, *against_best_rival(study, 0, K), TEN)
        for K in (4, 16)
    ]
    old = [
        Verdict(
            f"rollouts {stale.OLDEST} updates old, {K} responses", END, *against_best_rival(study, stale.OLDEST, K), TEN
        )
        for K in (4, 16)
    ]
    return [
        Verdict("an offset of one deviation per prompt", END, *under_an_offset(study, 1.0), TEN),
        Verdict("a factor per prompt (log-normal, σ 1)", END, *under_scales(study), TEN),
        Verdict("fresh rollouts, 2 responses per prompt", END, *against_ppo(study), "two languages"),
        *fresh,
        *old,
        Verdict(
            "fresh rollouts, 4 responses, every rate and coefficient",
            f"gain at KL {HIGHER_KL:g}",
            *equal_kl.best_rival(study, HIGHER_KL),
            TEN,
        ),
    ]


def table(study: Study) -> list[list[str]]:
    """Header first."""
    lines = [["where P3O differs", "answer", "P3O minus the best other", "measure", "on"]]
    for verdict in verdicts(study):
        found = verdict.estimate
        number = NOT_MEASURED if found is None else f"{cells.estimate(found, signed=True)}, {verdict.rival}"
        lines.append([verdict.question, reading(found), number, verdict.measure, verdict.where])
    return lines


def reading(estimate: Estimate | None) -> str:
    """What the interval says."""
    if estimate is None:
        return NOT_MEASURED
    if estimate.low <= 0 <= estimate.high:
        return "no evidence of a difference"
    by = "" if abs(estimate.mean) >= 0.05 else ", by little"
    return f"P3O is {'ahead' if estimate.mean > 0 else 'behind'}{by}"


def against_best_rival(study: Study, lag: int, responses: int) -> tuple[str, Estimate | None]:
    """The best P3O of the selection languages against the rival with the highest mean on those of the results, which
    is a choice in the rival's favour.
    """
    pairs = [pair for key, pair in stale.rivals(study).items() if key[:2] == (str(lag), str(responses))]
    return against_highest(study, pairs)


def against_highest(study: Study, pairs: list[tuple[Run, Run]]) -> tuple[str, Estimate | None]:
    means = {pair: many.measured(study, pair[1])["end"].mean() for pair in pairs}
    known = {pair: mean for pair, mean in means.items() if mean == mean}
    if not known:
        return "", None
    best = max(known, key=known.__getitem__)
    return many.name_of(best[1]), many.difference(study, best, "end")


def against_ppo(study: Study) -> tuple[str, Estimate | None]:
    """With the settings that the second comparison chose."""
    arms = {
        one.algorithm: one
        for group, one in objective.compared(study)
        if group == RETUNED and one.responses_per_prompt == 2
    }
    if not {"joint", "ppo"} <= arms.keys():
        return "", None
    ends = [objective.at_the_end(study, RETUNED, arms[name]).to_dict() for name in ("joint", "ppo")]
    return "PPO", paired_difference(*ends)


def under_an_offset(study: Study, deviation: float) -> tuple[str, Estimate | None]:
    """Joint P3O, which no offset moves, against PPO at the rate that is best for it there."""
    return against_highest(study, [(arm("joint"), rewards.ppo(deviation, rate)) for rate in PPO_RATES])


def under_scales(study: Study) -> tuple[str, Estimate | None]:
    """Joint P3O as it is against the best other algorithm, all under the same factors."""
    arms = [one for one in scales() if one.reward_spread and one.responses_per_prompt == 4]
    first = next(one for one in arms if one.algorithm == "joint")
    return against_highest(study, [(first, one) for one in arms if not one.algorithm.startswith("joint")])
