"""Stale rollouts: every algorithm at each lag, and what corrections do."""

from pathlib import Path

from benchmarks.frontier.report import measures
from benchmarks.frontier.report.figures import Mark, Row, draw
from benchmarks.frontier.report.measures import Study
from benchmarks.frontier.runs import stale
from benchmarks.frontier.runs.plan import BETA, CLIPPINGS, Run
from benchmarks.frontier.runs.tuned_arms import arm, selection_runs

OLDEST = max(stale.LAGS)


def arms(study: Study) -> list[Run]:
    """Everything that was compared."""
    if "corrections" not in study.chosen:
        return []
    return [
        one for lag in sorted(stale.LAGS) for one in stale.at_lag(lag, study.chosen["corrections"])
    ]


def tuned(study: Study, algorithm: str, own: float, lag: int, responses: int) -> Run:
    """An algorithm with the correction that was chosen for it."""
    chosen = study.chosen.get("corrections", {})
    correction = chosen.get(stale.label(algorithm, own), "none") if lag else "none"
    return arm(algorithm, responses, own, rounds_ahead=lag, correction=correction)


def best_p3o(study: Study, lag: int, responses: int) -> Run | None:
    """The P3O with the highest reward − BETA KL on the languages of the selection; None if none has
    run there.
    """
    ends = {}
    for one in arms(study):
        if one.algorithm in CLIPPINGS and (one.rounds_ahead, one.responses_per_prompt) == (
            lag,
            responses,
        ):
            rate = study.chosen.get("rates", {}).get(one.name)
            if rate is not None:
                ends[one] = measures.measures(study.records, selection_runs(one, rate))[
                    "end"
                ].mean()
    return max(ends, key=ends.__getitem__, default=None)


def rivals(study: Study, lag: int, responses: int) -> list[tuple[Run, Run]]:
    """The best P3O against every algorithm that is not P3O."""
    first = best_p3o(study, lag, responses)
    others = [
        tuned(study, *pair, lag, responses)
        for pair in stale.compared(lag)
        if pair[0] not in CLIPPINGS
    ]
    return [(first, other) for other in others] if first else []


def ratios(algorithm: str, own: float, responses: int) -> Run:
    """An algorithm at the largest lag with ratios to the policy that sampled."""
    return arm(algorithm, responses, own, rounds_ahead=OLDEST, correction="ratios")


def rows_of(study: Study, responses: int) -> list[Row]:
    """Every algorithm's paired differences of reward − BETA KL to joint P3O with fresh rollouts."""
    start, rows = tuned(study, "joint", 0.0, 0, responses), []
    ran = {pair for lag in stale.LAGS for pair in stale.compared(lag)}
    for algorithm, own in sorted(ran, key=lambda pair: ([*measures.NAMES].index(pair[0]), pair[1])):
        asked = {
            "fresh": tuned(study, algorithm, own, 0, responses),
            "stale": tuned(study, algorithm, own, OLDEST, responses),
            "ratios": ratios(algorithm, own, responses),
        }
        found = {
            name: measures.difference(study, (one, start), "end") for name, one in asked.items()
        }
        rows.append(Row(asked["fresh"], found))
    return rows


MARKS = {
    "fresh": Mark("o", "fresh rollouts", filled=False),
    "stale": Mark("D", f"{OLDEST} updates old, with the best correction"),
    "ratios": Mark("x", f"{OLDEST} updates old, ratios to the policy that sampled"),
}


def figure(study: Study, path: Path) -> bool:
    """What every algorithm reaches with fresh and stale rollouts."""
    panels = {
        f"{responses} responses to a prompt": rows_of(study, responses) for responses in (4, 16)
    }
    title = f"Reward − {BETA:g} KL after training, every algorithm tuned: paired differences on eight languages"
    return draw(panels, MARKS, minus="joint P3O with fresh rollouts", title=title, path=path)
