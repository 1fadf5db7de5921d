"""Gains at equal KL: every arm at its chosen learning rate, and differences over the seeds that two arms share."""

from typing import NamedTuple

from pandas import Series

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study, enough
from benchmarks.frontier.runs.plan import ALGORITHMS, KL_COEFS, LEARNING_RATES
from benchmarks.frontier.tasks.groups import DOCSTRINGS, LANGUAGES
from benchmarks.frontier.tasks.offsets import OFFSETS
from fastp3o.evaluation.matched_kl import Estimate, paired_difference

KLS = {LANGUAGES: (1.0, 2.0, 4.0), DOCSTRINGS: (0.1, 0.2, 0.4)}  # nats per response
# P3O and DPO see only differences of rewards, so one kind of offset is proof enough for them.
ARMS = [Arm(name, offset) for name in ALGORITHMS for offset in OFFSETS if name == "ppo" or offset != "learnable"]


class Comparison(NamedTuple):
    label: str
    first: Arm
    second: Arm


COMPARISONS = [
    *(Comparison(f"joint − {other}", Arm("joint"), Arm(other)) for other in ("ppo", "dpo", "separate", "none")),
    Comparison("joint − ppo, both with unlearnable offset", Arm("joint", "unlearnable"), Arm("ppo", "unlearnable")),
    *(
        Comparison(f"ppo with {offset} offset − ppo without", Arm("ppo", offset), Arm("ppo"))
        for offset in ("learnable", "unlearnable")
    ),
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
    """Joint clipping against PPO and DPO at rates that ran but were not chosen."""
    arms = [
        Arm(algorithm, learning_rate=rate)
        for algorithm in ("ppo", "dpo")
        for rate in LEARNING_RATES[group]
        if rate != study.chosen_rate(group, algorithm)
    ]
    return [
        Comparison(f"joint − {arm.algorithm} at {cells.rate(arm.learning_rate)}", Arm("joint"), arm)
        for arm in arms
        if len(study.runs_of(group, arm))
    ]


def matched_kls(study: Study, group: str) -> tuple[float, ...]:
    """The KLs to compare at: all for the languages; for docstrings, those that most seeds of every algorithm reach."""
    if group != DOCSTRINGS:
        return KLS[group]
    arms = [Arm(algorithm) for algorithm in ALGORITHMS if len(study.runs_of(group, Arm(algorithm)))]
    return tuple(
        kl for kl in KLS[group] if arms and all(reached(study.gains(group, arm, kl, "reward")) for arm in arms)
    )


def reached(gains: Series) -> bool:
    return enough(gains.count())


def difference(
    study: Study, group: str, comparison: Comparison, kl: float, outcome: str, comparisons: int = 1
) -> Estimate | None:
    """The paired difference over the seeds at which both arms have a gain; None without such seeds."""
    first, second = (study.gains(group, arm, kl, outcome).dropna().to_dict() for arm in comparison[1:])
    return paired_difference(first, second, comparisons)


def levels(study: Study, group: str) -> list[list[str]]:
    """The gains of every arm. Header first."""
    kls = matched_kls(study, group)
    lines = [["algorithm", "learning rate", "offset", "seeds", "first KL", "gain", *(f"at KL {kl:g}" for kl in kls)]]
    for arm in ARMS:
        runs = study.runs_of(group, arm)
        about = [arm.algorithm, cells.rate(study.chosen_rate(group, arm.algorithm)), arm.offset, str(len(runs))]
        for outcome, name in OUTCOMES[group].items():
            gains = [cells.mean(study.gains(group, arm, kl, outcome)) for kl in kls]
            lines.append([*about, cells.extent(runs["first_kl"]), name, *gains])
    return lines


def differences(study: Study, group: str) -> tuple[list[list[str]], int]:
    """The table of all comparisons, header first, and how many intervals hold together in it."""
    kls = matched_kls(study, group)

    def found(count: int) -> cells.Differences:
        return {
            (comparison.label, name): [difference(study, group, comparison, kl, outcome, count) for kl in kls]
            for comparison in COMPARISONS + rivals_at_other_rates(study, group)
            for outcome, name in OUTCOMES[group].items()
        }

    return cells.difference_table(["difference", "gain", *(f"at KL {kl:g}" for kl in kls)], found)
