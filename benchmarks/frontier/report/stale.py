"""Stale rollouts: every algorithm at each lag, and what corrections do."""

from pathlib import Path

from benchmarks.frontier.report import many
from benchmarks.frontier.report.rows import Mark, Row, draw
from benchmarks.frontier.report.study import Study
from benchmarks.frontier.runs import stale
from benchmarks.frontier.runs.plan import BETA, CLIPPINGS, Run
from benchmarks.frontier.runs.tuned_arms import PROMPTS, arm

OLDEST = max(stale.LAGS)
HEADER = ["lag", "K", "algorithm", "correction"]
RATIOS = [pair for pair, always in stale.ALWAYS.items() if "ratios" in always]


def arms(study: Study) -> dict[tuple[str, ...], Run]:
    """Everything that was compared, by lag, K, algorithm and correction."""
    if "corrections" not in study.tuned_arms:
        return {}
    return {label(one): one for lag in sorted(stale.LAGS) for one in stale.at_lag(lag, study.tuned_arms["corrections"])}


def label(one: Run) -> tuple[str, ...]:
    return str(one.rounds_ahead), str(one.responses_per_prompt), many.name_of(one), one.correction


def corrections() -> dict[tuple[str, ...], Run]:
    """The trials from which corrections were chosen."""
    found = [one for algorithm, own in stale.COMPARED for one in stale.corrected(algorithm, own)]
    return {label(one)[2:]: one for one in found}


def tuned(study: Study, algorithm: str, own: float, lag: int, responses: int) -> Run:
    """An algorithm with the correction that was chosen for it."""
    chosen = study.tuned_arms.get("corrections", {})
    correction = chosen.get(stale.label(algorithm, own), "none") if lag else "none"
    return arm(algorithm, responses, own, rounds_ahead=lag, correction=correction)


def best_p3o(study: Study, lag: int, responses: int) -> Run | None:
    """The P3O with the highest reward − BETA KL on the languages of the selection; None if none has run there."""
    ends = {}
    for one in arms(study).values():
        if one.algorithm in CLIPPINGS and (one.rounds_ahead, one.responses_per_prompt) == (lag, responses):
            rate = study.tuned_arms.get("rates", {}).get(one.name)
            if rate is not None:
                ends[one] = many.measures(study.records, many.selection_runs(one, rate))["end"].mean()
    return max(ends, key=ends.__getitem__, default=None)


def rivals(study: Study) -> many.Pairs:
    """The best P3O against every algorithm that is not P3O, at each lag with each K."""
    pairs = {}
    for lag in sorted(stale.LAGS):
        for responses in PROMPTS:
            first = best_p3o(study, lag, responses)
            for algorithm, own in stale.COMPARED if first else ():
                if algorithm not in CLIPPINGS:
                    second = tuned(study, algorithm, own, lag, responses)
                    pairs[str(lag), str(responses), described(first), described(second)] = first, second
    return pairs


def with_ratios(study: Study) -> many.Pairs:
    """At the largest lag: P3O without clipping against the others, all with ratios to the policy that sampled; and
    every algorithm with these ratios against itself without a correction.
    """
    pairs = {}
    for responses in PROMPTS:
        unclipped = ratios("none", 0.0, responses)
        for algorithm, own in RATIOS:
            one, plain = ratios(algorithm, own, responses), tuned(study, algorithm, own, OLDEST, responses)
            if one != unclipped:
                pairs[str(responses), described(unclipped), described(one)] = unclipped, one
            pairs[str(responses), described(one), described(plain)] = one, plain
    return pairs


def ratios(algorithm: str, own: float, responses: int) -> Run:
    """An algorithm at the largest lag with ratios to the policy that sampled."""
    return arm(algorithm, responses, own, rounds_ahead=OLDEST, correction="ratios")


def lost(study: Study) -> many.Pairs:
    """What stale rollouts cost: every algorithm with its correction at each lag against itself at none."""
    return {
        (str(lag), str(responses), described(old), described(fresh)): (old, fresh)
        for lag in sorted(stale.LAGS)
        for responses in PROMPTS
        for algorithm, own in stale.COMPARED
        if lag
        for old, fresh in [(tuned(study, algorithm, own, lag, responses), tuned(study, algorithm, own, 0, responses))]
    }


def described(one: Run) -> str:
    return f"{many.name_of(one)}, {one.correction}" if one.rounds_ahead else many.name_of(one)


def rows_of(study: Study, responses: int) -> list[Row]:
    """Every algorithm's paired differences of reward − BETA KL to joint P3O with fresh rollouts."""
    start, rows = tuned(study, "joint", 0.0, 0, responses), []
    for algorithm, own in stale.COMPARED:
        asked = {
            "fresh": tuned(study, algorithm, own, 0, responses),
            "stale": tuned(study, algorithm, own, OLDEST, responses),
            "ratios": ratios(algorithm, own, responses),
        }
        found = {name: many.difference(study, (one, start), "end") for name, one in asked.items()}
        rows.append(Row(asked["fresh"], found))
    return rows


MARKS = {
    "fresh": Mark("o", "fresh rollouts", filled=False),
    "stale": Mark("D", f"{OLDEST} updates old, with the best correction"),
    "ratios": Mark("x", f"{OLDEST} updates old, ratios to the policy that sampled"),
}


def figure(study: Study, path: Path) -> bool:
    """What every algorithm reaches with fresh and stale rollouts."""
    panels = {f"{responses} responses to a prompt": rows_of(study, responses) for responses in PROMPTS}
    title = f"Reward − {BETA:g} KL after training, every algorithm tuned: paired differences on eight languages"
    return draw(panels, MARKS, minus="joint P3O with fresh rollouts", title=title, path=path)
