"""A real model's tasks: where each algorithm ends, by the weight of the KL."""

from statistics import fmean

from benchmarks.frontier.report.measures import rate
from benchmarks.frontier.runs.human_preferences import ARMS, START, recorded
from benchmarks.frontier.tasks.task import RESULTS

COLUMNS = ("reward", "gold", "kl", "response_length", "gold/win_rate")


def table(task: str) -> list[list[str]]:
    """A line an arm and weight of the KL that has run, means over seeds. Header first. The interval
    of a win rate is over prompts, the mean of the seeds' own.
    """
    lines = recorded(RESULTS / f"{task}.jsonl")
    rows = [
        ["algorithm", "β", "seeds", "rate", "reward", "gold", "KL", "tokens", "gold prefers it"]
    ]
    cells = [(0.0, START)]
    cells += [
        (kl_coef, arm) for kl_coef in sorted({one["kl_coef"] for one in lines}) for arm in ARMS
    ]
    for cell in cells:
        own = [one for one in lines if (one["kl_coef"], one["arm"]) == cell]
        if not own:
            continue
        reward, gold, kl, tokens, preferred = (
            fmean(one["end"][column] for one in own) for column in COLUMNS
        )
        low, high = (
            fmean(one["end"][f"gold/win_rate_{bound}"] for one in own) for bound in ("low", "high")
        )
        rates = ", ".join(rate(one["learning_rate"]) for one in own if cell[1] != START)
        ends = [f"{reward:.2f}", f"{gold:.2f}", f"{kl:.1f}", f"{tokens:.1f}"]
        won = "" if cell[1] == START else f"{preferred:.2f} [{low:.2f}, {high:.2f}]"
        weight = "" if cell[1] == START else f"{cell[0]:g}"
        rows.append([cell[1], weight, str(len(own)), rates, *ends, won])
    return rows
