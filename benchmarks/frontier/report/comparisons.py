"""Gains at matched KL: of every arm at its chosen learning rate, and between arms over the seeds they share."""

from typing import NamedTuple

from benchmarks.frontier import cells
from benchmarks.frontier.plan import ALGORITHMS, DOCSTRINGS, KL_COEFS, LEARNING_RATES
from benchmarks.frontier.records import OFFSETS, OUTCOMES, Arm, Study, enough, gains_at
from fastp3o.evaluation.matched_kl import Estimate, Seed, paired_difference

KLS = {"languages": (1.0, 2.0, 4.0), DOCSTRINGS: (0.1, 0.2, 0.4)}  # nats per response
# P3O and DPO see differences of rewards only, for which one kind of offset is proof enough.
MAIN = [Arm(name, offset) for name in ALGORITHMS for offset in OFFSETS if name == "ppo" or offset != "learnable"]


class Comparison(NamedTuple):
    label: str
    first: Arm
    second: Arm


OTHERS = ("ppo", "dpo", "separate", "none")
OFFSET_KINDS = OFFSETS[1:]
COMPARISONS = [
    *(Comparison(f"joint − {other}", Arm("joint"), Arm(other)) for other in OTHERS),
    Comparison("joint − ppo, both with unlearnable offset", Arm("joint", "unlearnable"), Arm("ppo", "unlearnable")),
    *(Comparison(f"ppo with {kind} offset − ppo without", Arm("ppo", kind), Arm("ppo")) for kind in OFFSET_KINDS),
    Comparison("joint: K 4 of 32 prompts − K 2 of 64", Arm("joint", responses_per_prompt=4), Arm("joint")),
    *(
        Comparison(
            f"joint with KL coefficient {KL_COEFS['joint'][1]:g} − {other} with {KL_COEFS[other][1]:g}",
            Arm("joint", kl_coef=KL_COEFS["joint"][1]),
            Arm(other, kl_coef=KL_COEFS[other][1]),
        )
        for other in ("ppo", "dpo")
    ),
]


def rivals_at_other_rates(study: Study, group: str) -> list[Comparison]:
    """Joint clipping against PPO and DPO at rates that the selection seeds did not choose, as far as they ran."""
    arms = [
        Arm(algorithm, learning_rate=rate)
        for algorithm in ("ppo", "dpo")
        for rate in LEARNING_RATES[group]
        if rate != study.rate(group, algorithm)
    ]
    return [
        Comparison(f"joint − {arm.algorithm} at {cells.rate(arm.learning_rate)}", Arm("joint"), arm)
        for arm in arms
        if study.runs_of(group, arm)
    ]


def matched_kls(study: Study, group: str) -> tuple[float, ...]:
    """The KLs to compare at: of the languages all, of the docstrings those that most seeds of every algorithm reach."""
    if group != DOCSTRINGS:
        return KLS[group]
    arms = [runs for algorithm in ALGORITHMS if (runs := study.runs_of(group, Arm(algorithm)))]
    return tuple(kl for kl in KLS[group] if arms and all(reached(gains_at(runs, kl, "reward")) for runs in arms))


def reached(gains: dict[Seed, float | None]) -> bool:
    return enough(sum(gain is not None for gain in gains.values()))


def difference(
    study: Study, group: str, comparison: Comparison, kl: float, of: str, comparisons: int = 1
) -> Estimate | None:
    """Over the seeds at which both arms have a gain; None where there are none."""
    first, second = (gains_at(study.runs_of(group, arm), kl, of) for arm in comparison[1:])
    return paired_difference(first, second, comparisons)


def levels(study: Study, group: str) -> list[list[str]]:
    """Every arm. Header first."""
    kls = matched_kls(study, group)
    rows = [["algorithm", "learning rate", "offset", "seeds", "first KL", "gain", *(f"at KL {kl:g}" for kl in kls)]]
    for arm in MAIN:
        runs = study.runs_of(group, arm)
        about = [arm.algorithm, cells.rate(study.rate(group, arm.algorithm)), arm.offset, str(len(runs))]
        for of, outcome in OUTCOMES[group].items():
            gains = [cells.level(gains_at(runs, kl, of)) for kl in kls]
            rows.append([*about, cells.first_kl(runs), outcome, *gains])
    return rows


def differences(study: Study, group: str) -> tuple[list[list[str]], int]:
    """Every comparison, and the number of intervals that hold together. Header first."""
    kls = matched_kls(study, group)
    outcomes = OUTCOMES[group]
    comparisons = COMPARISONS + rivals_at_other_rates(study, group)
    wanted = [(comparison, kl, of) for comparison in comparisons for kl in kls for of in outcomes]
    count = sum(difference(study, group, *one) is not None for one in wanted)
    rows = [["difference", "gain", *(f"at KL {kl:g}" for kl in kls)]]
    for comparison in comparisons:
        for of, outcome in outcomes.items():
            found = [difference(study, group, comparison, kl, of, count) for kl in kls]
            rows.append([comparison.label, outcome, *(cells.estimate(one, signed=True) for one in found)])
    return rows, count
