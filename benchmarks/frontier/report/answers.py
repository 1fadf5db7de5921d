"""What the questions found: gains at matched KL, and paired differences."""

from benchmarks.frontier.report import cells, together
from benchmarks.frontier.report.questions import Point, Question
from benchmarks.frontier.report.study import OUTCOMES, Study
from benchmarks.frontier.runs.tuning import ENVELOPE_KLS
from benchmarks.frontier.tasks.groups import RETUNED
from fastp3o.evaluation.matched_kl import Estimate, paired_difference


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
    """Over the seeds at which both have a gain; None where there are none."""
    if first.arm is None or second.arm is None:
        return None
    gains = (study.gains(point.group, point.arm, kl, outcome).dropna().to_dict() for point in (first, second))
    return paired_difference(*gains, count)


def differences(study: Study, question: Question) -> tuple[list[list[str]], int]:
    """Paired, and the number of intervals that hold together; what has no runs is left out. Header first."""
    wanted = [(kl, outcome) for outcome in OUTCOMES[RETUNED] for kl in ENVELOPE_KLS]

    def found(count: int) -> together.Found:
        compared = {
            (label,): [difference(study, first, second, *one, count) for one in wanted]
            for label, (first, second) in question.pairs.items()
        }
        return {label: estimates for label, estimates in compared.items() if any(estimates)}

    names = OUTCOMES[RETUNED]
    return together.table(["difference", *(f"{names[outcome]} at KL {kl:g}" for kl, outcome in wanted)], found)
