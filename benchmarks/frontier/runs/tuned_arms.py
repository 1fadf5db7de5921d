"""Arms on the ten languages: every arm of a question runs at the rate that is best for it.

An arm is a run without task, seed and learning rate. Its rate is the one with the highest reward −
BETA KL at the end, which is what all train for, on two languages and seeds that no result uses. The
results have one seed on each of the other eight, so they are independent.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.frontier.runs.plan import BETA, Run
from benchmarks.frontier.tasks.task import TASKS

# responses per prompt -> prompts of an update: equally many responses
PROMPTS = {
    2: 64,
    4: 32,
    16: 8,
}
RATES = (3e-4, 6e-4, 1.5e-4, 1.2e-3)

RESULTS = tuple(enumerate(TASKS[:8]))  # seed, task
SELECTION = tuple(zip((100, 101), TASKS[8:], strict=True))

# Choices of the selection runs: "rates" -> the name of an arm -> its rate; "corrections", see
# stale.py.
CHOSEN = Path(__file__).parent / "tuned_arms.json"


def arm(
    algorithm: str,
    responses: int = 4,
    own: float = 0.0,
    *,
    rounds_ahead: int = 0,
    correction: str = "none",
    reward_spread: float = 0.0,
) -> Run:
    return Run(
        task="",
        algorithm=algorithm,
        learning_rate=0.0,
        kl_coef=BETA,
        seed=0,
        responses_per_prompt=responses,
        prompts_per_update=PROMPTS[responses],
        own_parameter=own,
        rounds_ahead=rounds_ahead,
        correction=correction,
        reward_spread=reward_spread,
    )


def rates_of(arm: Run) -> tuple[float, ...]:
    """The rates that an arm tries: four, twice as high for plain RLOO, which makes one pass over a
    round.
    """
    return tuple(2.0 * rate for rate in RATES) if arm.algorithm == "rloo" else RATES


def selection_runs(arm: Run, rate: float) -> list[Run]:
    return [replace(arm, task=task, seed=seed, learning_rate=rate) for seed, task in SELECTION]


def trials(arms: Iterable[Run]) -> Iterator[Run]:
    """Every arm at every rate."""
    arms = list(arms)
    for number in range(len(RATES)):
        for one in arms:
            yield from selection_runs(one, rates_of(one)[number])


def results(arms: Iterable[Run]) -> Iterator[Run]:
    """Every arm at its rate, all of one language before the next. ValueError if an arm's rate was
    not chosen.
    """
    arms = list(arms)
    for seed, task in RESULTS:
        for one in arms:
            yield replace(one, task=task, seed=seed, learning_rate=chosen_rate(one))


def chosen() -> dict[str, dict]:
    return json.loads(CHOSEN.read_text()) if CHOSEN.exists() else {}


def required(name: str, part: str) -> dict:
    """The choices of a name. ValueError if `part` has not made them."""
    found = chosen().get(name)
    if found is None:
        raise ValueError(f"{CHOSEN} has no {name}: run the part `{part}` first")
    return found


def chosen_rate(arm: Run) -> float:
    rate = chosen().get("rates", {}).get(arm.name)
    if rate is None:
        raise ValueError(f"{CHOSEN} has no rate of {arm.name}: run the part with `_rates` first")
    return rate


def write(**parts: dict) -> None:
    """Adds to CHOSEN."""
    known = chosen()
    merged = {name: known.get(name, {}) | values for name, values in parts.items()}
    CHOSEN.write_text(json.dumps(known | merged, indent=2) + "\n")
    print(f"chosen: {parts}")
