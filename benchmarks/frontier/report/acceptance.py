"""Rules that were fixed before the runs, and whether the runs obey them.

Rules 1 to 5 are about the languages, whose utility is known. Rewards, and so the bounds, are in standard deviations of
the reward over responses of the fine-tuned policy.
"""

import math
from typing import NamedTuple

import pandas as pd

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.comparisons import ARMS, Comparison, difference, rivals_at_other_rates
from benchmarks.frontier.report.endpoints import HIGH_KLS
from benchmarks.frontier.report.sanity import SMALLEST_ESS, Optimum, above_optimum, held_against_optimum
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study, enough
from benchmarks.frontier.runs.plan import CLIPPINGS, HIGH_LEARNING_RATE, LEARNING_RATES
from benchmarks.frontier.tasks.groups import LANGUAGES, STUDIED
from benchmarks.goals import NOT_MEASURED

PASS, FAIL = "pass", "fail"
UPDATES = 10  # enough for rounding to show
RATES = 3  # tried for each algorithm
MISSING_EOS = 0.02


class CheckedRule(NamedTuple):
    rule: str
    numbers: str
    verdict: str  # PASS, FAIL or NOT_MEASURED


class Bound(NamedTuple):
    """A rule that the lower limit of a difference at a KL lies above `above`."""

    comparison: Comparison
    kl: float
    outcome: str  # "reward" or "gold"
    above: float


def checked_rules(study: Study, optimum: Optimum) -> list[CheckedRule]:
    return [
        invariance(study),
        sensitivity_of_ppo(study),
        better_than_ppo_under_an_offset(study),
        not_inferior_without_offset(study),
        clipping(study),
        below_the_optimum(study, optimum),
        ends_of_sequences(study),
    ]


def invariance(study: Study) -> CheckedRule:
    numbers, parts = [], []
    for algorithm in CLIPPINGS:
        pairs = pd.concat(final_weights(study, group, algorithm) for group in STUDIED)
        equal = (pairs["plain"] == pairs["shifted"]).sum()
        numbers.append(f"{algorithm}: {equal} of {len(pairs)} pairs of runs")
        parts.append(passed(equal == len(pairs)) if len(pairs) else NOT_MEASURED)
    rule = f"1. Equal weights with the unlearnable offset and without, after at least {UPDATES} updates"
    return CheckedRule(rule, "; ".join(numbers), together(parts))


def final_weights(study: Study, group: str, algorithm: str) -> pd.DataFrame:
    """Hashes of the weights without the offset (plain) and with it (shifted), for the seeds that ran both."""
    plain, shifted = (study.runs_of(group, Arm(algorithm, offset)) for offset in ("none", "unlearnable"))
    plain = plain[plain["final_step"] >= UPDATES]
    return pd.concat({"plain": plain["sha256"], "shifted": shifted["sha256"]}, axis=1, join="inner")


def sensitivity_of_ppo(study: Study) -> CheckedRule:
    bounds = [
        Bound(Comparison(f"PPO's drop{at_rate(arm)}", Arm("ppo"), arm), kl, "reward", 0.3)
        for arm in ppo_under_offset(study)
        for kl in (2.0, 4.0)
    ]
    learnable = Comparison("learnable", Arm("ppo"), Arm("ppo", "learnable"))
    beside = [Bound(learnable, kl, "reward", 0.3) for kl in (2.0, 4.0)]
    numbers, verdict = judged(study, measured_or_chosen(study, bounds))
    rule = "2. PPO's drop under the unlearnable offset: lower limit above 0.3"
    return CheckedRule(rule, f"{numbers}; for comparison {judged(study, beside)[0]}", verdict)


def better_than_ppo_under_an_offset(study: Study) -> CheckedRule:
    limits = {"reward": 0.3, "gold": 0.0}
    bounds = [
        Bound(Comparison(f"joint − ppo{at_rate(arm)}", Arm("joint", "unlearnable"), arm), kl, outcome, above)
        for arm in ppo_under_offset(study)
        for outcome, above in limits.items()
        for kl in (2.0, 4.0)
    ]
    rule = "3. P3O over PPO under the unlearnable offset: lower limit above 0.3 (proxy), above 0 (gold)"
    return CheckedRule(rule, *judged(study, measured_or_chosen(study, bounds)))


def ppo_under_offset(study: Study) -> list[Arm]:
    """PPO under the unlearnable offset at its chosen rate and at every other, as noise may want slower steps."""
    chosen = study.chosen_rate(LANGUAGES, "ppo")
    others = [Arm("ppo", "unlearnable", rate) for rate in LEARNING_RATES[LANGUAGES] if rate != chosen]
    return [Arm("ppo", "unlearnable"), *others]


def at_rate(arm: Arm) -> str:
    return "" if arm.learning_rate is None else f" at {cells.rate(arm.learning_rate)}"


def measured_or_chosen(study: Study, bounds: list[Bound]) -> list[Bound]:
    """The bounds at the chosen rate, and those at other rates that enough runs reach."""
    return [b for b in bounds if b.comparison.second.learning_rate is None or judged(study, [b])[1] != NOT_MEASURED]


def not_inferior_without_offset(study: Study) -> CheckedRule:
    comparisons = [Comparison(f"joint − {other}", Arm("joint"), Arm(other)) for other in ("ppo", "dpo")]
    comparisons += rivals_at_other_rates(study, LANGUAGES)
    bounds = [Bound(comparison, kl, "reward", -0.1) for comparison in comparisons for kl in (1.0, 2.0)]
    numbers, verdict = judged(study, measured_or_chosen(study, bounds))
    tried = [rates_on_selection_seeds(study, algorithm) for algorithm in ("joint", "ppo", "dpo")]
    rule = f"4. No offset: lower limit above −0.1; at least {RATES} learning rates an algorithm, on seeds of their own"
    chosen = passed(min(tried) >= RATES) if any(tried) else NOT_MEASURED
    return CheckedRule(rule, f"{numbers}; {min(tried)} learning rates", together([verdict, chosen]))


def rates_on_selection_seeds(study: Study, algorithm: str) -> int:
    """How many learning rates ran on the selection seeds."""
    runs = study.records.runs
    rates = runs.loc[runs["algorithm"] == algorithm, "learning_rate"].unique()
    return sum(len(study.runs_of(LANGUAGES, Arm(algorithm, learning_rate=rate), selection=True)) > 0 for rate in rates)


def clipping(study: Study) -> CheckedRule:
    """Rule 5. The gain is judged at the highest KL that enough pairs of runs reach, where clipping matters most."""
    joint, none = (Arm(name, learning_rate=HIGH_LEARNING_RATE) for name in ("joint", "none"))
    excess = study.runs_of(LANGUAGES, none)["final_kl"] - study.runs_of(LANGUAGES, joint)["final_kl"]
    shared, below = excess.count(), (excess > 0).sum()
    comparison = Comparison("joint − none", joint, none)
    bounds = [Bound(comparison, kl, "reward", 0.0) for kl in HIGH_KLS]
    highest = next((bound for bound in reversed(bounds) if judged(study, [bound])[1] != NOT_MEASURED), bounds[-1])
    numbers, verdict = judged(study, [highest])
    rate = cells.rate(HIGH_LEARNING_RATE)
    rule = (
        f"5. Learning rate {rate}: final KL of joint below none in every seed, gain over none with lower limit above 0"
    )
    slower = passed(below == shared) if enough(shared) else NOT_MEASURED
    return CheckedRule(rule, f"KL below in {below} of {shared}; {numbers}", together([slower, verdict]))


def below_the_optimum(study: Study, optimum: Optimum) -> CheckedRule:
    compared = held_against_optimum(study.records, optimum)
    above = above_optimum(compared)
    numbers = f"{len(above)} of {len(compared)} evaluations above"
    for one in above.itertuples():
        numbers += f"; {one.run} at update {one.step:g}, KL {one.kl:.2f}: {one.errors:.1f} standard errors"
    rule = f"6. No evaluation above the optimum of effective sample size {SMALLEST_ESS} by two standard errors"
    return CheckedRule(rule, numbers, passed(above.empty) if len(compared) else NOT_MEASURED)


def ends_of_sequences(study: Study) -> CheckedRule:
    rule = f"6. Responses without end-of-sequence below {MISSING_EOS:.0%} in every evaluation at chosen learning rates"
    numbers, shares = [], []
    for group in STUDIED:
        runs = pd.concat(study.runs_of(group, arm) for arm in ARMS)
        evaluations = study.evaluations_of(runs)["missing_eos"]
        if len(evaluations):
            # Among equals, the last by name and update.
            worst = evaluations.sort_index().sort_values(kind="stable")[-1:]
            ((run, update),), share = worst.index, worst.item()
            numbers.append(f"{group}: at most {share:.1%} ({run}, update {update:g})")
            shares.append(share)
    if not shares:
        return CheckedRule(rule, NOT_MEASURED, NOT_MEASURED)
    return CheckedRule(rule, "; ".join(numbers), passed(max(shares) < MISSING_EOS))


def judged(study: Study, bounds: list[Bound]) -> tuple[str, str]:
    """Numbers and verdict of bounds that must hold together; "not measured" if one has too few pairs of runs."""
    numbers, parts = [], []
    for comparison, kl, outcome, above in bounds:
        found = difference(study, LANGUAGES, comparison, kl, outcome, comparisons=len(bounds))
        measured = found is not None and enough(found.count) and math.isfinite(found.low)
        parts.append(passed(found.low > above) if measured else NOT_MEASURED)
        name = OUTCOMES[LANGUAGES][outcome]
        numbers.append(f"{comparison.label}, {name} at KL {kl:g}: {cells.estimate(found, signed=True)}")
    return "; ".join(numbers), together(parts)


def together(parts: list[str]) -> str:
    """FAIL if any part failed, otherwise NOT_MEASURED if any was not measured, otherwise PASS."""
    return next((verdict for verdict in (FAIL, NOT_MEASURED) if verdict in parts), PASS)


def passed(holds: bool) -> str:
    return PASS if holds else FAIL
