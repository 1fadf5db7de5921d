"""What was to be shown, fixed before the runs, and whether they show it. Rules 1 to 5 are about the languages, where a
utility is known.

Rewards, and so the bounds, are in standard deviations of the reward over responses of the fine-tuned policy.
"""

import math
from typing import NamedTuple

from benchmarks.frontier import cells
from benchmarks.frontier.comparisons import MAIN, Comparison, difference, rivals_at_other_rates
from benchmarks.frontier.endpoints import CLIPPINGS, HIGH_KLS, final_kls
from benchmarks.frontier.plan import GROUPS, HIGH_LEARNING_RATE, LEARNING_RATES
from benchmarks.frontier.records import OUTCOMES, Arm, Study, by_seed, enough, name_of
from benchmarks.frontier.sanity import SMALLEST_ESS, Optimum, above_optimum
from benchmarks.goals import NOT_MEASURED

LANGUAGES = "languages"
PASS, FAIL = "pass", "fail"
UPDATES = 10  # that rounding would need to show
RATES = 3  # tried for each algorithm
MISSING_EOS = 0.02


class Verdict(NamedTuple):
    rule: str
    numbers: str
    verdict: str  # PASS, FAIL or NOT_MEASURED


class Bound(NamedTuple):
    """The lower limit of a difference at a KL shall lie above `above`."""

    comparison: Comparison
    kl: float
    of: str
    above: float


def verdicts(study: Study, optimum: Optimum) -> list[Verdict]:
    return [
        invariance(study),
        sensitivity_of_ppo(study),
        better_than_ppo_under_an_offset(study),
        not_inferior_without_offset(study),
        clipping(study),
        below_the_optimum(study, optimum),
        ends_of_sequences(study),
    ]


def invariance(study: Study) -> Verdict:
    numbers, parts = [], []
    for algorithm in CLIPPINGS:
        pairs = [pair for group in GROUPS for pair in hashes(study, group, algorithm)]
        equal = sum(plain == shifted for plain, shifted in pairs)
        numbers.append(f"{algorithm}: {equal} of {len(pairs)} pairs of runs")
        parts.append(passed(equal == len(pairs)) if pairs else NOT_MEASURED)
    rule = f"1. Equal weights with the unlearnable offset and without, after at least {UPDATES} updates"
    return Verdict(rule, "; ".join(numbers), together(parts))


def hashes(study: Study, group: str, algorithm: str) -> list[tuple[str, str]]:
    """Of the final weights, without the offset and with it."""
    plain, shifted = (by_seed(study.runs_of(group, Arm(algorithm, offset))) for offset in ("none", "unlearnable"))
    shared = [seed for seed in plain if seed in shifted and plain[seed]["evaluations"][-1]["step"] >= UPDATES]
    return [(plain[seed]["sha256"], shifted[seed]["sha256"]) for seed in shared]


def sensitivity_of_ppo(study: Study) -> Verdict:
    bounds = [
        Bound(Comparison(f"PPO's drop{at_rate(arm)}", Arm("ppo"), arm), kl, "reward", 0.3)
        for arm in ppo_under_offset(study)
        for kl in (2.0, 4.0)
    ]
    learnable = Comparison("learnable", Arm("ppo"), Arm("ppo", "learnable"))
    beside = [Bound(learnable, kl, "reward", 0.3) for kl in (2.0, 4.0)]
    numbers, verdict = judged(study, measured_or_main(study, bounds))
    rule = "2. PPO's drop under the unlearnable offset: lower limit above 0.3"
    return Verdict(rule, f"{numbers}; for comparison {judged(study, beside)[0]}", verdict)


def better_than_ppo_under_an_offset(study: Study) -> Verdict:
    limits = {"reward": 0.3, "gold": 0.0}
    bounds = [
        Bound(Comparison(f"joint − ppo{at_rate(arm)}", Arm("joint", "unlearnable"), arm), kl, of, above)
        for arm in ppo_under_offset(study)
        for of, above in limits.items()
        for kl in (2.0, 4.0)
    ]
    rule = "3. P3O over PPO under the unlearnable offset: lower limit above 0.3 (proxy), above 0 (gold)"
    return Verdict(rule, *judged(study, measured_or_main(study, bounds)))


def ppo_under_offset(study: Study) -> list[Arm]:
    """At its chosen rate, and at every other that was tried there: noise may want slower steps."""
    chosen = study.rate(LANGUAGES, "ppo")
    others = [Arm("ppo", "unlearnable", rate) for rate in LEARNING_RATES[LANGUAGES] if rate != chosen]
    return [Arm("ppo", "unlearnable"), *others]


def at_rate(arm: Arm) -> str:
    return "" if arm.learning_rate is None else f" at {cells.rate(arm.learning_rate)}"


def measured_or_main(study: Study, bounds: list[Bound]) -> list[Bound]:
    """Those at the chosen rate, and of the other rates those that enough runs get to."""
    return [b for b in bounds if b.comparison.second.learning_rate is None or judged(study, [b])[1] != NOT_MEASURED]


def not_inferior_without_offset(study: Study) -> Verdict:
    comparisons = [Comparison(f"joint − {other}", Arm("joint"), Arm(other)) for other in ("ppo", "dpo")]
    comparisons += rivals_at_other_rates(study, LANGUAGES)
    bounds = [Bound(comparison, kl, "reward", -0.1) for comparison in comparisons for kl in (1.0, 2.0)]
    numbers, verdict = judged(study, measured_or_main(study, bounds))
    tried = [rates_tried(study, algorithm) for algorithm in ("joint", "ppo", "dpo")]
    rule = f"4. No offset: lower limit above −0.1; at least {RATES} learning rates an algorithm, on seeds of their own"
    chosen = passed(min(tried) >= RATES) if any(tried) else NOT_MEASURED
    return Verdict(rule, f"{numbers}; {min(tried)} learning rates", together([verdict, chosen]))


def rates_tried(study: Study, algorithm: str) -> int:
    """On seeds that no result is from."""
    arms = {Arm(algorithm, learning_rate=run["learning_rate"]) for run in study.runs if run["algorithm"] == algorithm}
    return sum(bool(study.runs_of(LANGUAGES, arm, selection=True)) for arm in arms)


def clipping(study: Study) -> Verdict:
    """The gain is judged where clipping matters most: at the highest KL that enough pairs of runs reach."""
    joint, none = (Arm(name, learning_rate=HIGH_LEARNING_RATE) for name in ("joint", "none"))
    clipped, free = (final_kls(study.runs_of(LANGUAGES, arm)) for arm in (joint, none))
    shared = [seed for seed in clipped if seed in free]
    below = sum(clipped[seed] < free[seed] for seed in shared)
    comparison = Comparison("joint − none", joint, none)
    bounds = [Bound(comparison, kl, "reward", 0.0) for kl in HIGH_KLS]
    highest = next((bound for bound in reversed(bounds) if judged(study, [bound])[1] != NOT_MEASURED), bounds[-1])
    numbers, verdict = judged(study, [highest])
    rate = cells.rate(HIGH_LEARNING_RATE)
    rule = (
        f"5. Learning rate {rate}: final KL of joint below none in every seed, gain over none with lower limit above 0"
    )
    slower = passed(below == len(shared)) if enough(len(shared)) else NOT_MEASURED
    return Verdict(rule, f"KL below in {below} of {len(shared)}; {numbers}", together([slower, verdict]))


def below_the_optimum(study: Study, optimum: Optimum) -> Verdict:
    compared, above = above_optimum(study.runs, optimum)
    numbers = f"{len(above)} of {compared} evaluations above"
    for excess in above:
        numbers += f"; {excess.run} at update {excess.step}, KL {excess.kl:.2f}: {excess.errors:.1f} standard errors"
    rule = f"6. No evaluation above the optimum of effective sample size {SMALLEST_ESS} by two standard errors"
    return Verdict(rule, numbers, passed(not above) if compared else NOT_MEASURED)


def ends_of_sequences(study: Study) -> Verdict:
    rule = f"6. Responses without end-of-sequence below {MISSING_EOS:.0%} in every evaluation at chosen learning rates"
    worst = {}
    for group in GROUPS:
        runs = [run for arm in MAIN for run in study.runs_of(group, arm)]
        shares = [
            (e["missing_eos"], f"{name_of(run)}, update {e['step']:g}") for run in runs for e in run["evaluations"]
        ]
        if shares:
            worst[group] = max(shares)
    if not worst:
        return Verdict(rule, NOT_MEASURED, NOT_MEASURED)
    numbers = "; ".join(f"{group}: at most {share:.1%} ({where})" for group, (share, where) in worst.items())
    return Verdict(rule, numbers, passed(all(share < MISSING_EOS for share, _ in worst.values())))


def judged(study: Study, bounds: list[Bound]) -> tuple[str, str]:
    """Numbers and verdict of limits that shall hold together; too few pairs of runs for a limit: not measured."""
    numbers, parts = [], []
    for comparison, kl, of, above in bounds:
        found = difference(study, LANGUAGES, comparison, kl, of, comparisons=len(bounds))
        measured = found is not None and enough(found.count) and math.isfinite(found.low)
        parts.append(passed(found.low > above) if measured else NOT_MEASURED)
        outcome = OUTCOMES[LANGUAGES][of]
        numbers.append(f"{comparison.label}, {outcome} at KL {kl:g}: {cells.estimate(found, signed=True)}")
    return "; ".join(numbers), together(parts)


def together(parts: list[str]) -> str:
    """One failure fails; otherwise all must have been measured."""
    return next((verdict for verdict in (FAIL, NOT_MEASURED) if verdict in parts), PASS)


def passed(holds: bool) -> str:
    return PASS if holds else FAIL
