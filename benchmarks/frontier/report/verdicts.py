"""The table at the top of README.md: a question, its answer in words, the number, and where it was measured."""

from pathlib import Path
from typing import NamedTuple

from pandas import DataFrame, Series

from benchmarks.frontier.report import equal_kl, measures, stale
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.report.stale import OLDEST
from benchmarks.frontier.runs.equal_kl import KLS
from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.runs.rewards import PPO_RATES, ppo, scales
from benchmarks.frontier.runs.tuned_arms import RESULTS, arm
from benchmarks.goals import NOT_MEASURED
from benchmarks.report import markdown, write_between
from fastp3o.evaluation.matched_kl import Estimate, Seed, gain_at_kl, paired_difference

README = Path(__file__).parents[1] / "README.md"
END = f"reward − {BETA:g} KL"
TEN = "ten languages"
# Algorithm, learning rate and KL coefficient of the comparisons before.
K2 = (("joint", 3e-4, BETA), ("ppo", 1.5e-4, BETA))
EARLIER_KL, FIRST_P3O = 4.0, ("joint", 3e-4, 0.03)
FIRST_RIVALS = (("ppo", 3e-4, 0.03), ("dpo", 1.5e-4, 0.1), ("dpo", 7.5e-5, 0.1))
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
    # Two languages with four seeds each, at the rates that the selection seeds chose.
    earlier_difference = paired_difference(*(ends(earlier(study, "retuned", *arm)) for arm in K2))
    # Joint P3O, which no offset moves, against PPO at the rate that is best for it there.
    offset = against_highest(study, [(arm("joint"), ppo(1.0, rate)) for rate in PPO_RATES])
    # The best P3O of the selection languages against the rival with the highest mean on those of the results, which is
    # a choice in the rival's favour.
    by_lag = [
        Verdict(f"{name}, {K} responses{more}", END, *against_highest(study, stale.rivals(study, lag, K)), TEN)
        for lag, name, more in ((0, "fresh rollouts", " per prompt"), (OLDEST, f"rollouts {OLDEST} updates old", ""))
        for K in (4, 16)
    ]
    return [
        Verdict("an offset of one deviation per prompt", END, *offset, TEN),
        Verdict("a factor per prompt (log-normal, σ 1)", END, *under_scales(study), TEN),
        Verdict("fresh rollouts, 2 responses per prompt", END, "PPO", earlier_difference, "two languages"),
        *by_lag,
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
        number = NOT_MEASURED if found is None else f"{measures.estimate(found, signed=True)}, {verdict.rival}"
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


def against_highest(study: Study, pairs: list[tuple[Run, Run]]) -> tuple[str, Estimate | None]:
    means = {pair: measures.measured(study, pair[1])["end"].mean() for pair in pairs}
    known = {pair: mean for pair, mean in means.items() if mean == mean}
    if not known:
        return "", None
    best = max(known, key=known.__getitem__)
    return measures.name_of(best[1]), measures.difference(study, best, "end")


def earlier(study: Study, group: str, algorithm: str, rate: float, kl_coef: float) -> DataFrame:
    """Plain runs with two responses of the comparisons before the ten languages, on the seeds of their results."""
    plain = {"responses_per_prompt": 2, "offset": "none", "own_parameter": 0.0, "reward_factor": 1.0, "updates": 0}
    wanted = plain | {"group": group, "algorithm": algorithm, "learning_rate": rate, "kl_coef": kl_coef}
    runs = study.records.runs
    return runs[(runs[list(wanted)] == Series(wanted)).all(axis=1) & (runs["seed"] < len(RESULTS))].assign(
        gain=lambda found: [gain_at_kl(study.records.histories[name], EARLIER_KL) for name in found["name"]]
    )


def ends(runs: DataFrame, column: str = "final_objective") -> dict[Seed, float]:
    """By language and seed, for those that have it."""
    found = runs.set_index(["task", "seed"])[column].dropna()
    return {seed: float(value) for seed, value in found.items()}


def earlier_table(study: Study) -> list[list[str]]:
    """Two responses per prompt, with intervals that hold together for all that was compared then. Header first."""
    lines = [["P3O minus", "rate", "measure", "single", "together", "compared"]]
    pairs = [("retuned", END, "final_objective", K2[1], K2[0], 19)]
    pairs += [("language", f"gain at KL {EARLIER_KL:g}", "gain", one, FIRST_P3O, 72) for one in FIRST_RIVALS]
    for group, measure, column, rival, joint, count in pairs:
        values = [ends(earlier(study, group, *arm), column) for arm in (joint, rival)]
        found = [measures.estimate(paired_difference(*values, some), signed=True) for some in (1, count)]
        lines.append([measures.NAMES[rival[0]], measures.rate(rival[1]), measure, *found, str(count)])
    return lines


def under_scales(study: Study) -> tuple[str, Estimate | None]:
    """Joint P3O as it is against the best other algorithm, all under the same factors."""
    arms = [one for one in scales() if one.reward_spread and one.responses_per_prompt == 4]
    first = next(one for one in arms if one.algorithm == "joint")
    return against_highest(study, [(first, one) for one in arms if not one.algorithm.startswith("joint")])
