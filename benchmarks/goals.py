"""The goals and what the results say of them.

Ratios to a bare operation are of medians measured in turns in one process. A goal holds for every head and number of
tokens that was measured; the worst counts.
"""

from collections.abc import Callable
from typing import NamedTuple

Results = list[dict]
NOT_MEASURED = "not measured"
# The updates that the goals of packing are about.
TLDR = {"level": "training", "prompt": 350, "response": 40, "K": 2}

# 128 responses of a 1 B model.
ONE_B = {"D": 2048, "prompt": 350, "response": 40, "mean": None, "K": 2}


class Finding(NamedTuple):
    measured: str
    met: str  # "met", "not met" or NOT_MEASURED


class Goal(NamedTuple):
    what: str
    goal: str
    verdict: Callable[[Results], Finding]


def select(results: Results, **wanted: object) -> Results:
    return [result for result in results if all(result.get(key) == value for key, value in wanted.items())]


def ours(results: Results, level: str, passes: str) -> Results:
    return select(results, level=level, passes=passes, implementation="fastp3o")


def at_most(values: list[float], bound: float, form: str) -> Finding:
    return judged(max(values), max(values) <= bound, form) if values else Finding(NOT_MEASURED, NOT_MEASURED)


def at_least(values: list[float], bound: float, form: str) -> Finding:
    return judged(min(values), min(values) >= bound, form) if values else Finding(NOT_MEASURED, NOT_MEASURED)


def judged(worst: float, met: bool, form: str) -> Finding:
    return Finding(form.format(worst), "met" if met else "not met")


def bandwidth(passes: str, bound: float) -> Callable[[Results], Finding]:
    return lambda results: at_least(
        [1 / result["ratio_to_bare"] for result in ours(results, "logits", passes)], bound, "{:.0%}"
    )


def products(passes: str, bound: float) -> Callable[[Results], Finding]:
    return lambda results: at_most(
        [result["ratio_to_bare"] for result in ours(results, "hidden", passes)], bound, "{:.2f} ×"
    )


def speedups(results: Results, level: str, names: Callable[[str], bool]) -> list[float]:
    """Others' time over fastp3o's, by their ratios to the same bare operation."""
    passes = "forward and backward"
    return [
        other["ratio_to_bare"] / mine["ratio_to_bare"]
        for mine in ours(results, level, passes)
        for other in select(
            results, level=level, passes=passes, **{key: mine.get(key) for key in ("N", "D", "V", "dtype")}
        )
        if names(other["implementation"])
    ]


def eightfold(name: str) -> bool:
    """Peers that compute the logits twice."""
    return name == "TRL" or name.startswith("CCE") or name == "torch linear_cross_entropy"


def extra_over_logits(results: Results) -> list[float]:
    """Over the logits' own bytes, of which the pass moves three times as many."""
    both = ours(results, "logits", "forward and backward")
    return [1e9 * result["extra_gb"] / (result["bytes"] / 3) for result in both if result["extra_gb"] is not None]


def extra_gb(results: Results) -> list[float]:
    both = ours(results, "hidden", "forward and backward")
    return [result["extra_gb"] for result in both if result["extra_gb"] is not None]


def growth(results: Results, figure: Callable[[dict], float | None]) -> list[float]:
    """The growth of a figure from fewer tokens to more of the same head; 1 if it stays."""
    both = [result for result in ours(results, "hidden", "forward and backward") if figure(result) is not None]
    heads = [{key: few.get(key) for key in ("D", "V", "dtype")} for few in both]
    pairs = [
        (few, many)
        for few, head in zip(both, heads, strict=True)
        for many in select(both, **head)
        if many["N"] > few["N"]
    ]
    return [figure(many) / figure(few) for few, many in pairs]


def log_ratio_errors(results: Results) -> list[float]:
    return [result["log_ratio_error"] for result in select(results, level="precision")]


def over_plain(results: Results) -> list[float]:
    """The speed of rows with shared prompts over that of plain ones, which are timed in turns with them."""
    return [1 / result["ratio_to_bare"] for result in select(results, **TLDR, implementation="shared prompts")]


def over_padded(results: Results) -> list[float]:
    padded = select(results, **TLDR, implementation="padded")
    return [result["ratio_to_bare"] * speed for result in padded for speed in over_plain(results)]


def over_generate(results: Results, cuda: bool, **shape: object) -> list[float]:
    """The engine's tokens a second over those of `generate`."""
    rollouts = select(results, level="rollouts", cuda=cuda, **shape)
    return [result["ways"]["fastp3o engine"]["ratio"] for result in rollouts if "fastp3o engine" in result["ways"]]


def share_of_floor(results: Results) -> list[float]:
    """The floor, operations of the prompts and bytes of the steps, over the time."""
    found = [result["ways"] for result in select(results, level="rollouts", cuda=True, **ONE_B)]
    engines = [ways["fastp3o engine"] for ways in found if "fastp3o engine" in ways]
    return [engine["floor_ms"] / engine["ms"] for engine in engines]


def over_trl(results: Results) -> list[float]:
    """The time of an iteration of TRL's trainers over that of ours."""
    iterations = select(results, level="iteration", cuda=False)
    trainers = [figures for result in iterations for name, figures in result["trainers"].items() if "TRL" in name]
    return [figures["ratio"] for figures in trainers if "absent" not in figures]


GOALS = [
    Goal("logits → log-probs, forward", "≥ 92% of the copy bandwidth", bandwidth("forward", 0.92)),
    Goal("backward in place", "≥ 92% of it", bandwidth("backward", 0.92)),
    Goal(
        "logits-level loss, forward + backward",
        "≥ 5 × eager",
        lambda results: at_least(speedups(results, "logits", "eager".__eq__), 5, "{:.1f} ×"),
    ),
    Goal(
        "the same",
        "≥ 1.5 × torch.compile",
        lambda results: at_least(speedups(results, "logits", "torch.compile".__eq__), 1.5, "{:.2f} ×"),
    ),
    Goal(
        "its extra memory",
        "< 1% of the logits",
        lambda results: at_most(extra_over_logits(results), 0.01, "{:.2%}"),
    ),
    Goal(
        "hidden-level loss, forward + backward", "≤ 1.15 × three bare products", products("forward and backward", 1.15)
    ),
    Goal(
        "the same",
        "≥ 1.2 × every peer that computes logits twice",
        lambda results: at_least(speedups(results, "hidden", eightfold), 1.2, "{:.2f} ×"),
    ),
    Goal(
        "the same",
        "never slower than a peer",
        lambda results: at_least(
            speedups(results, "hidden", lambda name: not name.startswith("fastp3o")), 1.0, "{:.2f} ×"
        ),
    ),
    Goal(
        "its peak memory over inputs and gradients",
        "≤ 1 GB at any N",
        lambda results: at_most(extra_gb(results), 1.0, "{:.2f} GB"),
    ),
    Goal(
        "error of a 128-token log-ratio",
        "≤ 0.002",
        lambda results: at_most(log_ratio_errors(results), 0.002, "{:.1e}"),
    ),
    Goal("frozen head", "≤ 1.10 × two bare products", products("frozen head, forward and backward", 1.10)),
    Goal(
        "shared-prompt packing, TL;DR-like lengths",
        "≥ 1.6 × plain packing",
        lambda results: at_least(over_plain(results), 1.6, "{:.2f} ×"),
    ),
    Goal(
        "the same",
        "≥ 3 × padded batches",
        lambda results: at_least(over_padded(results), 3, "{:.2f} ×"),
    ),
    Goal(
        "cost growth",
        "time linear in N (within 5%)",
        lambda results: at_most(growth(results, lambda result: result["ms"] / result["N"]), 1.05, "{:.2f} of linear"),
    ),
    Goal(
        "the same",
        "peak memory flat (within 5%)",
        lambda results: at_most(growth(results, lambda result: result["extra_gb"]), 1.05, "{:.2f} ×"),
    ),
    Goal(
        "rollouts on a CPU, ragged (350, 40), K 2",
        "≥ 3 × generate",
        lambda results: at_least(over_generate(results, False, prompt=350, response=128, mean=40, K=2), 3, "{:.2f} ×"),
    ),
    Goal(
        "the same, any shape",
        "≥ 1 × generate",
        lambda results: at_least(over_generate(results, False), 1, "{:.2f} ×"),
    ),
    Goal(
        "rollouts on an H200, 128 responses of a 1 B model",
        "≥ 60% of the floor",
        lambda results: at_least(share_of_floor(results), 0.6, "{:.0%}"),
    ),
    Goal(
        "the same",
        "≥ 10 × generate",
        lambda results: at_least(over_generate(results, True, **ONE_B), 10, "{:.1f} ×"),
    ),
    Goal(
        "a whole iteration on a CPU",
        "≥ 5 × TRL",
        lambda results: at_least(over_trl(results), 5, "{:.2f} ×"),
    ),
]
