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
    """values: what was measured, of which the worst counts. bound: the least value; the largest where `at_most`."""

    what: str
    goal: str
    values: Callable[[Results], list[float]]
    bound: float
    form: str
    at_most: bool = False

    def verdict(self, results: Results) -> Finding:
        values = self.values(results)
        if not values:
            return Finding(NOT_MEASURED, NOT_MEASURED)
        worst = max(values) if self.at_most else min(values)
        met = worst <= self.bound if self.at_most else worst >= self.bound
        return Finding(self.form.format(worst), "met" if met else "not met")


def select(results: Results, **wanted: object) -> Results:
    return [result for result in results if all(result.get(key) == value for key, value in wanted.items())]


def ours(results: Results, level: str, passes: str) -> Results:
    return select(results, level=level, passes=passes, implementation="fastp3o")


def bandwidth(passes: str) -> Callable[[Results], list[float]]:
    return lambda results: [1 / result["ratio_to_bare"] for result in ours(results, "logits", passes)]


def products(passes: str) -> Callable[[Results], list[float]]:
    return lambda results: [result["ratio_to_bare"] for result in ours(results, "hidden", passes)]


def speedups(level: str, names: Callable[[str], bool]) -> Callable[[Results], list[float]]:
    """Others' time over fastp3o's, by their ratios to the same bare operation."""

    def values(results: Results) -> list[float]:
        both = select(results, level=level, passes="forward and backward")
        return [
            other["ratio_to_bare"] / mine["ratio_to_bare"]
            for mine in select(both, implementation="fastp3o")
            for other in select(both, **{key: mine.get(key) for key in ("N", "D", "V", "dtype")})
            if names(other["implementation"])
        ]

    return values


def eightfold(name: str) -> bool:
    """Peers that compute the logits twice."""
    return name == "TRL" or name.startswith("CCE") or name == "torch linear_cross_entropy"


def is_a_peer(name: str) -> bool:
    return not name.startswith("fastp3o")


def extra_over_logits(results: Results) -> list[float]:
    """Over the logits' own bytes, of which the pass moves three times as many."""
    both = ours(results, "logits", "forward and backward")
    return [1e9 * result["extra_gb"] / (result["bytes"] / 3) for result in both if result["extra_gb"] is not None]


def extra_gb(results: Results) -> list[float]:
    both = ours(results, "hidden", "forward and backward")
    return [result["extra_gb"] for result in both if result["extra_gb"] is not None]


def growth(figure: Callable[[dict], float | None]) -> Callable[[Results], list[float]]:
    """The growth of a figure from fewer tokens to more of the same head; 1 if it stays."""

    def values(results: Results) -> list[float]:
        both = [one for one in ours(results, "hidden", "forward and backward") if figure(one) is not None]
        return [
            figure(many) / figure(few)
            for few in both
            for many in select(both, **{key: few.get(key) for key in ("D", "V", "dtype")})
            if many["N"] > few["N"]
        ]

    return values


def over_plain(results: Results) -> list[float]:
    """The speed of rows with shared prompts over that of plain ones, which are timed in turns with them."""
    return [1 / result["ratio_to_bare"] for result in select(results, **TLDR, implementation="shared prompts")]


def over_padded(results: Results) -> list[float]:
    padded = select(results, **TLDR, implementation="padded")
    return [result["ratio_to_bare"] * speed for result in padded for speed in over_plain(results)]


def over_generate(cuda: bool, **shape: object) -> Callable[[Results], list[float]]:
    """The engine's tokens a second over those of `generate`."""

    def values(results: Results) -> list[float]:
        rollouts = select(results, level="rollouts", cuda=cuda, **shape)
        return [result["ways"]["fastp3o engine"]["ratio"] for result in rollouts if "fastp3o engine" in result["ways"]]

    return values


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


def share_of_products(kind: str) -> Callable[[Results], list[float]]:
    """Of an update or of log-probs of (350, 40), the time that the bare products would take, over the time."""
    return lambda results: [
        1 / result["ratio_to_bare"]
        for result in select(results, level="model")
        if result["passes"].startswith(f"{kind}, prompts of 350")
    ]


BOTH, SAME = "forward and backward", "the same"
RAGGED = {"prompt": 350, "response": 128, "mean": 40, "K": 2}
GOALS = [
    Goal("logits → log-probs, forward", "≥ 92% of the copy bandwidth", bandwidth("forward"), 0.92, "{:.0%}"),
    Goal("backward in place", "≥ 92% of it", bandwidth("backward"), 0.92, "{:.0%}"),
    Goal("logits-level loss, forward + backward", "≥ 5 × eager", speedups("logits", "eager".__eq__), 5, "{:.1f} ×"),
    Goal(SAME, "≥ 1.5 × torch.compile", speedups("logits", "torch.compile".__eq__), 1.5, "{:.2f} ×"),
    Goal("its extra memory", "< 1% of the logits", extra_over_logits, 0.01, "{:.2%}", True),
    Goal(
        "hidden-level loss, forward + backward", "≤ 1.15 × three bare products", products(BOTH), 1.15, "{:.2f} ×", True
    ),
    Goal(SAME, "≥ 1.2 × every peer that computes logits twice", speedups("hidden", eightfold), 1.2, "{:.2f} ×"),
    Goal(SAME, "never slower than a peer", speedups("hidden", is_a_peer), 1.0, "{:.2f} ×"),
    Goal("its peak memory over inputs and gradients", "≤ 1 GB at any N", extra_gb, 1.0, "{:.2f} GB", True),
    Goal("frozen head", "≤ 1.10 × two bare products", products(f"frozen head, {BOTH}"), 1.1, "{:.2f} ×", True),
    Goal("shared-prompt packing, TL;DR-like lengths", "≥ 1.6 × plain packing", over_plain, 1.6, "{:.2f} ×"),
    Goal(SAME, "≥ 3 × padded batches", over_padded, 3, "{:.2f} ×"),
    Goal(
        "cost growth",
        "time linear in N (within 5%)",
        growth(lambda result: result["ms"] / result["N"]),
        1.05,
        "{:.2f} of linear",
        True,
    ),
    Goal(SAME, "peak memory flat (within 5%)", growth(lambda result: result["extra_gb"]), 1.05, "{:.2f} ×", True),
    Goal("rollouts on a CPU, ragged (350, 40), K 2", "≥ 3 × generate", over_generate(False, **RAGGED), 3, "{:.2f} ×"),
    Goal("the same, any shape", "≥ 1 × generate", over_generate(False), 1, "{:.2f} ×"),
    Goal("rollouts on an H200, 128 responses of a 1 B model", "≥ 60% of the floor", share_of_floor, 0.6, "{:.0%}"),
    Goal(SAME, "≥ 10 × generate", over_generate(True, **ONE_B), 10, "{:.1f} ×"),
    Goal("update on a CPU, (350, 40)", "≥ 50% of the rate of products", share_of_products("update"), 0.5, "{:.0%}"),
    Goal("log-probs on a CPU, (350, 40)", "≥ 50% of it", share_of_products("log-probs"), 0.5, "{:.0%}"),
    Goal("a whole iteration on a CPU", "≥ 3 × TRL", over_trl, 3, "{:.2f} ×"),
]
