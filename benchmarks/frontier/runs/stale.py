"""Rollouts of an older policy."""

from collections.abc import Iterator, Mapping

from benchmarks.frontier.runs.plan import CLIPPINGS, Run
from benchmarks.frontier.runs.tuned_arms import PROMPTS, arm, rates_of, required, selection_runs

LAGS = (6, 0, 2)  # the one that says most first

# Algorithm and its own parameter. REBEL's was best for reward − BETA KL in the comparison before.
COMPARED = (
    *((name, 0.0) for name in (*CLIPPINGS, "ppo", "grpo", "dapo")),
    *(("gspo", 0.003), ("gspo", 0.03), ("rloo", 0.0), ("rebel", 3.0)),
)
CORRECTIONS = ("none", "ratios", "weights")
# Corrections that run at the largest lag whether chosen or not: ratios to the policy that sampled, RLOO without weights
# and with them. At other lags it is P3O's without clipping alone.
ALWAYS = {
    **{(name, own): ("ratios",) for name, own in COMPARED if name not in ("dapo", "rloo") and own != 0.003},
    ("rloo", 0.0): ("none", "weights"),
}
UNCLIPPED = {("none", 0.0): ("ratios",)}


def corrected(algorithm: str, own: float) -> list[Run]:
    """The arms from which an algorithm's correction is chosen, at half of the rates. RLOO has no ratios."""
    return [
        arm(algorithm, own=own, rounds_ahead=max(LAGS), correction=correction)
        for correction in CORRECTIONS
        if algorithm != "rloo" or correction != "ratios"
    ]


def corrections() -> Iterator[Run]:
    """Every algorithm with every correction."""
    for number in range(2):
        for algorithm, own in COMPARED:
            for one in corrected(algorithm, own):
                yield from selection_runs(one, rates_of(one)[number])


def label(algorithm: str, own: float) -> str:
    """The name of an algorithm with its own parameter in `tuned_arms.CHOSEN`."""
    return f"{algorithm} {own:g}" if own else algorithm


def at_lag(lag: int, chosen: Mapping[str, str] | None = None) -> Iterator[Run]:
    """What is compared at a lag: with fresh rollouts nothing needs a correction.

    chosen: the correction of each `label`; by default those of `tuned_arms.CHOSEN`.
    """
    further = ALWAYS if lag == max(LAGS) else UNCLIPPED if lag else {}
    if chosen is None:
        chosen = required("corrections", "corrections") if lag else {}
    for responses in PROMPTS:
        for algorithm, own in COMPARED:
            best = chosen[label(algorithm, own)] if lag else "none"
            for correction in dict.fromkeys([best, *further.get((algorithm, own), ())]):
                yield arm(algorithm, responses, own, rounds_ahead=lag, correction=correction)
