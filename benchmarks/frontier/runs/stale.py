"""Rollouts of an older policy."""

from collections.abc import Iterator, Mapping

from benchmarks.frontier.runs.plan import CLIPPINGS, Run
from benchmarks.frontier.runs.tuned_arms import arm, rates_of, required, selection_runs

LAGS = (6, 0)  # the one that says most first

# Algorithm and its own parameter. REBEL's was best for reward − BETA KL in the comparison before.
COMPARED = (
    *((name, 0.0) for name in (*CLIPPINGS, "ppo", "grpo", "dapo")),
    *(("gspo", 0.003), ("gspo", 0.03), ("rloo", 0.0), ("rebel", 3.0)),
)
# OAPL's β2 is the better of 0.3 and the paper's 1e-3.
STALE = (("vespo", 0.0), ("oapl", 0.3), ("copg", 0.0), ("grpo-k1", 0.0), ("rloo-token", 0.0))
FRESH = tuple(
    (name, 0.0)
    for name in ("grpo-k1", "rloo-token", "rloo-response", "dr_grpo-k1", "dr_grpo", "dapo-k1")
)
CORRECTIONS = ("none", "ratios", "weights")
# Ratios to the policy that sampled run whether chosen or not.
RATIOS = [
    (name, own)
    for name, own in COMPARED
    if name in (*CLIPPINGS, "ppo", "grpo", "rebel") or own == 0.03
]


def compared(lag: int) -> tuple[tuple[str, float], ...]:
    """Each algorithm that runs at a lag, and its own parameter."""
    return COMPARED + (STALE if lag else FRESH)


def corrected(algorithm: str, own: float) -> list[Run]:
    """The arms from which an algorithm's correction is chosen, at half of the rates. Two have no
    ratios.
    """
    return [
        arm(algorithm, own=own, rounds_ahead=max(LAGS), correction=correction)
        for correction in CORRECTIONS
        if algorithm not in ("rloo", "copg") or correction != "ratios"
    ]


def corrections() -> Iterator[Run]:
    """Every algorithm with every correction."""
    for number in range(2):
        for algorithm, own in compared(max(LAGS)):
            for one in corrected(algorithm, own):
                yield from selection_runs(one, rates_of(one)[number])


def label(algorithm: str, own: float) -> str:
    """The name of an algorithm with its own parameter in `tuned_arms.CHOSEN`."""
    return f"{algorithm} {own:g}" if own else algorithm


def at_lag(lag: int, chosen: Mapping[str, str] | None = None) -> Iterator[Run]:
    """What is compared at a lag: with fresh rollouts nothing needs a correction.

    chosen: the correction of each `label`; by default those of `tuned_arms.CHOSEN`.
    """
    if chosen is None:
        chosen = required("corrections", "corrections") if lag else {}
    for responses in (4, 16):
        for algorithm, own in compared(lag):
            corrections = [chosen[label(algorithm, own)]] if lag else ["none"]
            corrections += ["ratios"] if lag and (algorithm, own) in RATIOS else []
            for correction in dict.fromkeys(corrections):
                yield arm(algorithm, responses, own, rounds_ahead=lag, correction=correction)
