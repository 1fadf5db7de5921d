"""One setting at a time: clip range, size of the rewards, wrong labels, size of the policy."""

from typing import NamedTuple

from benchmarks.frontier.report import cells
from benchmarks.frontier.report.envelope import tuned_arm
from benchmarks.frontier.report.study import OUTCOMES, Arm, Study
from benchmarks.frontier.runs.questions import CLIP_RANGES, REWARD_FACTORS, RIVALS, SCALED, SIZE_RATES
from benchmarks.frontier.runs.tuning import ENVELOPE_KLS, QUESTIONS_KL
from benchmarks.frontier.tasks.groups import RETUNED, SIZES, WRONG_LABELS
from benchmarks.frontier.tasks.synthetic import FLIPPED
from fastp3o.evaluation.matched_kl import Estimate, paired_difference

DEFAULT_CLIP_RANGE = 0.2


class Point(NamedTuple):
    """Runs with one value of the setting that a question varies; arm is None if its learning rate was not chosen."""

    algorithm: str
    value: float
    group: str
    arm: Arm | None
    rate_factor: float = 1.0  # times the chosen rate


# The name of a comparison -> its two sides.
Pairs = dict[str, tuple[Point, Point]]


class Question(NamedTuple):
    """The figure shows the gain in `outcome` at `kl`; the tables show every outcome and KL."""

    title: str
    varied: str
    points: list[Point]
    pairs: Pairs
    kl: float = QUESTIONS_KL
    outcome: str = "reward"  # or "gold"


def questions(study: Study) -> list[Question]:
    clips, factors = clip_ranges(study), reward_factors(study)
    labels, parameters = with_wrong_labels(study), sizes(study)
    return [
        Question("clip range", "ε", clips, with_default(clips, DEFAULT_CLIP_RANGE) | joint_with_any_rival(clips)),
        Question("rewards multiplied", "rewards times", factors, with_default(factors, 1.0)),
        Question(
            "wrong labels of the reward model",
            "share of wrong labels",
            labels,
            joint_with_rivals(labels, "wrong labels"),
            outcome="gold",
        ),
        # Not all runs of the largest policy reach the KL of the other questions at its lowest rate.
        Question(
            "size of the policy", "parameters", parameters, joint_with_rivals(parameters, "parameters"), ENVELOPE_KLS[0]
        ),
    ]


def question_arm(study: Study, algorithm: str) -> Arm | None:
    """The runs of `runs.questions.tuned_run`; None if no setting was chosen."""
    base = algorithm.partition("-")[0]
    arms = [tuned_arm(study, base, kl) for kl in ENVELOPE_KLS if kl <= QUESTIONS_KL]
    chosen = [arm for arm in arms if arm is not None]
    return chosen[-1]._replace(algorithm=algorithm) if chosen else None


def clip_ranges(study: Study) -> list[Point]:
    return [
        Point(name, clip, RETUNED, arm and arm._replace(own_parameter=0.0 if clip == DEFAULT_CLIP_RANGE else clip))
        for name, clips in CLIP_RANGES.items()
        for arm in [question_arm(study, name)]
        for clip in clips
    ]


def reward_factors(study: Study) -> list[Point]:
    return [
        Point(name, factor, RETUNED, arm and arm._replace(reward_factor=factor))
        for name in (*SCALED, "dpo")
        for arm in [question_arm(study, name)]
        for factor in REWARD_FACTORS
    ]


def with_wrong_labels(study: Study) -> list[Point]:
    shares = {RETUNED: FLIPPED} | WRONG_LABELS
    return [Point(name, share, group, question_arm(study, name)) for name in RIVALS for group, share in shares.items()]


def sizes(study: Study) -> list[Point]:
    return [
        Point(name, value, group, arm and arm._replace(learning_rate=factor * arm.learning_rate), factor)
        for name in RIVALS
        for arm in [question_arm(study, name)]
        for group, value in ({RETUNED: 100_000} | SIZES).items()
        for factor in SIZE_RATES.get(group, (1.0,))
    ]


def with_default(points: list[Point], default: float) -> Pairs:
    """Every algorithm with each value against its default."""
    return {
        f"{point.algorithm}: {point.value:g} − {other.value:g}": (point, other)
        for point in points
        for other in points
        if other.algorithm == point.algorithm and other.value == default != point.value
    }


def joint_with_any_rival(points: list[Point]) -> Pairs:
    """Joint clipping with its default against others at every value, as theirs may be better than their default."""
    joint = next(point for point in points if (point.algorithm, point.value) == ("joint", DEFAULT_CLIP_RANGE))
    return {
        f"joint with {joint.value:g} − {point.algorithm} with {point.value:g}": (joint, point)
        for point in points
        if point.algorithm in ("ppo", "grpo")
    }


def joint_with_rivals(points: list[Point], varied: str) -> Pairs:
    """Joint clipping against each rival, at every value and with the same factor on both chosen rates."""
    return {
        f"joint − {other.algorithm}, {varied} {point.value:,.7g}{part(point)}": (point, other)
        for point in points
        for other in points
        if point.algorithm == "joint" != other.algorithm
        and (point.value, point.rate_factor) == (other.value, other.rate_factor)
    }


def part(point: Point) -> str:
    return "" if point.rate_factor == 1 else f", {point.rate_factor:g} of the rate"


def table(study: Study, question: Question) -> list[list[str]]:
    """Header first."""
    kls, outcomes = ENVELOPE_KLS, OUTCOMES[RETUNED]
    gains = [f"{name} at KL {kl:g}" for name in outcomes.values() for kl in kls]
    lines = [["algorithm", question.varied, "learning rate", "seeds", "final KL", *gains]]
    for point in question.points:
        if point.arm is None:
            continue
        runs = study.runs_of(point.group, point.arm)
        about = [point.algorithm, f"{point.value:,.7g}", cells.rate(point.arm.learning_rate), str(len(runs))]
        found = [cells.mean(study.records.at_kl(runs, kl, outcome)) for outcome in outcomes for kl in kls]
        lines.append([*about, cells.mean(runs["final_kl"]), *found])
    return lines


def difference(study: Study, first: Point, second: Point, kl: float, outcome: str, count: int = 1) -> Estimate | None:
    """The paired difference over the seeds at which both have a gain; None without such seeds."""
    if first.arm is None or second.arm is None:
        return None
    gains = (study.gains(point.group, point.arm, kl, outcome).dropna().to_dict() for point in (first, second))
    return paired_difference(*gains, count)


def differences(study: Study, question: Question) -> tuple[list[list[str]], int]:
    """The table of paired differences that have runs, header first, and how many intervals hold together in it."""
    wanted = [(kl, outcome) for outcome in OUTCOMES[RETUNED] for kl in ENVELOPE_KLS]

    def found(count: int) -> cells.Differences:
        compared = {
            (label,): [difference(study, first, second, *one, count) for one in wanted]
            for label, (first, second) in question.pairs.items()
        }
        return {label: estimates for label, estimates in compared.items() if any(estimates)}

    names = OUTCOMES[RETUNED]
    return cells.difference_table(["difference", *(f"{names[outcome]} at KL {kl:g}" for kl, outcome in wanted)], found)
