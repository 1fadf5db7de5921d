"""Every run that was recorded, none left out."""

from operator import itemgetter

from benchmarks.frontier import cells
from benchmarks.frontier.records import Record, final_gain, name_of


def table(runs: list[Record]) -> list[list[str]]:
    """Header first."""
    rows = [["run", "first KL", "final KL", "final gain, proxy", "gold", "missing EOS", "weights", "s"]]
    return rows + [row(run) for run in sorted(runs, key=itemgetter(*ORDER))]


ORDER = ("task", "algorithm", "offset", "responses_per_prompt", "learning_rate", "kl_coef", "seed")


def row(run: Record) -> list[str]:
    last = run["evaluations"][-1]
    return [
        name_of(run),
        cells.first_kl([run]),
        cells.number(last["kl"]),
        cells.number(final_gain(run, "reward")),
        cells.number(final_gain(run, "gold")) if "gold" in last else "",
        f"{last['missing_eos']:.1%}",
        run["sha256"][:12],
        f"{run['seconds']:.0f}",
    ]
