"""The goals and what the results say of them.

Ratios to a bare operation are of medians measured in turns in one process. A goal is about one
device, and no result of another reaches it. It holds for every head and number of tokens that was
measured; the worst counts.
"""

from collections.abc import Callable
from typing import NamedTuple

from benchmarks.records import NOT_MEASURED, Results, select
from fastp3o_kernels.head.chunks import MOST_BUDGET

GPU, CPU = "GPU", "CPU"
# The updates that the goals of packing are about.
TLDR = {"level": "training", "prompt": 350, "response": 40, "K": 2}

# 128 responses of a 1 B model.
ONE_B = {"D": 2048, "prompt": 350, "response": 40, "mean": None, "K": 2}


class Finding(NamedTuple):
    measured: str
    met: str  # "met", "not met" or NOT_MEASURED


class Goal(NamedTuple):
    """device: whose results `values` gets. values: what was measured, of which the worst counts.
    bound: the least value; the largest where `at_most`.
    """

    device: str
    what: str
    goal: str
    values: Callable[[Results], list[float]]
    bound: float
    form: str
    at_most: bool = False

    def verdict(self, results: Results) -> Finding:
        """results: of any devices, each with `cuda`: whether a GPU gave it."""
        values = self.values(select(results, cuda=self.device == GPU))
        if not values:
            return Finding(NOT_MEASURED, NOT_MEASURED)
        worst = max(values) if self.at_most else min(values)
        met = worst <= self.bound if self.at_most else worst >= self.bound
        return Finding(self.form.format(worst), "met" if met else "not met")


def ours(results: Results, level: str, passes: str) -> Results:
    return select(results, level=level, passes=passes, implementation="fastp3o")


def bandwidth(passes: str) -> Callable[[Results], list[float]]:
    return lambda results: [
        1 / result["ratio_to_bare"] for result in ours(results, "logits", passes)
    ]


def products(
    passes: str, holds: Callable[[dict], bool] = lambda _: True
) -> Callable[[Results], list[float]]:
    """holds: of which heads the goal is."""
    return lambda results: [
        result["ratio_to_bare"] for result in ours(results, "hidden", passes) if holds(result)
    ]


def is_large(result: dict) -> bool:
    """Whether a head's vocabulary is among the largest in use."""
    return result["V"] >= 256_000


def is_smaller(result: dict) -> bool:
    return not is_large(result)


def speedups(
    level: str, names: Callable[[str], bool], mine: str = "fastp3o", **shape: object
) -> Callable[[Results], list[float]]:
    """Others' time over that of `mine`, by their ratios to the same bare operation."""

    def values(results: Results) -> list[float]:
        both = select(results, level=level, passes="forward and backward", **shape)
        return [
            other["ratio_to_bare"] / one["ratio_to_bare"]
            for one in select(both, implementation=mine)
            for other in select(both, **{key: one.get(key) for key in ("N", "D", "V", "dtype")})
            if names(other["implementation"])
        ]

    return values


def eightfold(name: str) -> bool:
    """Peers that compute the logits twice."""
    return name in ("TRL", "Liger scaled", "torch linear_cross_entropy") or name.startswith("CCE")


def is_a_peer(name: str) -> bool:
    """Also one whose loss is an easier one: a mean cross-entropy has no coefficients of tokens."""
    return not name.startswith("fastp3o")


def larger_than_trl(results: Results) -> list[float]:
    """The extra memory of `linear_logprobs` over that of TRL's."""
    both = select(results, level="hidden", passes=BOTH)
    return [
        mine["extra_gb"] / trl["extra_gb"]
        for mine in select(both, implementation=LOGPROBS)
        for trl in select(
            both, implementation="TRL", **{key: mine.get(key) for key in ("N", "D", "V", "dtype")}
        )
        if mine["extra_gb"] is not None and trl["extra_gb"] is not None
    ]


def reward_gain(results: Results) -> list[float]:
    """From the first of a run's updates to the last."""
    return [run["rewards"][-1] - run["rewards"][0] for run in select(results, level="training run")]


def extra_over_logits(results: Results) -> list[float]:
    """Over the logits' own bytes, of which the pass moves three times as many."""
    both = ours(results, "logits", "forward and backward")
    return [
        1e9 * result["extra_gb"] / (result["bytes"] / 3)
        for result in both
        if result["extra_gb"] is not None
    ]


def extra_over_need(results: Results) -> list[float]:
    """Memory beyond inputs and gradients over what a loss needs that computes the logits once: the
    gradient of all logits in half precision, 2 N V bytes; or, for more tokens, the largest budget,
    and the 2 V D bytes by which a sum of the weight's gradient in fp32 is larger than the gradient.
    """
    return [
        1e9
        * result["extra_gb"]
        / min(2 * result["N"] * result["V"], MOST_BUDGET + 2 * result["V"] * result["D"])
        for result in ours(results, "hidden", "forward and backward")
        if result["extra_gb"] is not None
    ]


def time_growth(results: Results) -> list[float]:
    """The growth of the time a token from fewer tokens to more of the same head; 1 if it stays."""
    both = ours(results, "hidden", "forward and backward")
    return [
        many["ms"] / many["N"] / (few["ms"] / few["N"])
        for few in both
        for many in select(both, **{key: few.get(key) for key in ("D", "V", "dtype")})
        if many["N"] > few["N"]
    ]


def over_plain(results: Results) -> list[float]:
    """The speed of rows with shared prompts over that of plain ones, which are timed in turns with
    them.
    """
    return [
        1 / result["ratio_to_bare"]
        for result in select(results, **TLDR, implementation="shared prompts")
    ]


def over_padded(results: Results) -> list[float]:
    padded = select(results, **TLDR, implementation="padded")
    return [result["ratio_to_bare"] * speed for result in padded for speed in over_plain(results)]


def over_generate(**shape: object) -> Callable[[Results], list[float]]:
    """The engine's tokens a second over those of `generate`."""

    def values(results: Results) -> list[float]:
        found = [result["ways"] for result in select(results, level="rollouts", **shape)]
        return [ways["fastp3o engine"]["ratio"] for ways in found if "fastp3o engine" in ways]

    return values


def share_of_floor(results: Results) -> list[float]:
    """The floor, operations of the prompts and bytes of the steps, over the time."""
    found = [result["ways"] for result in select(results, level="rollouts", **ONE_B)]
    engines = [ways["fastp3o engine"] for ways in found if "fastp3o engine" in ways]
    return [engine["floor_ms"] / engine["ms"] for engine in engines]


def over_trl(results: Results) -> list[float]:
    """The time of an iteration of TRL's trainers over that of ours."""
    iterations = select(results, level="iteration")
    trainers = [
        figures
        for result in iterations
        for name, figures in result["trainers"].items()
        if "TRL" in name
    ]
    return [figures["ratio"] for figures in trainers if "absent" not in figures]


def share_of_products(kind: str) -> Callable[[Results], list[float]]:
    """Of an update or of log-probs of (350, 40), the time that the bare products would take, over
    the time.
    """
    return lambda results: [
        1 / result["ratio_to_bare"]
        for result in select(results, level="model")
        if result["passes"].startswith(f"{kind}, prompts of 350")
    ]


def chosen(over: str) -> Callable[[Results], list[float]]:
    """Time of the head with the products that were chosen, over something else."""
    return lambda results: [
        result["ratio_to_bare"]
        for result in select(results, level="chosen products", implementation="fastp3o")
        if result["passes"].endswith(f"over {over}")
    ]


BOTH, SAME = "forward and backward", "the same"
BY_TORCH = "fastp3o by torch's products"
LOGPROBS = "fastp3o linear_logprobs"
SLOWER = "never slower than a peer"
RAGGED = {"prompt": 350, "response": 128, "mean": 40, "K": 2}
GOALS = [
    Goal(
        GPU,
        "logits → log-probs, forward",
        "≥ 92% of the copy bandwidth",
        bandwidth("forward"),
        0.92,
        "{:.0%}",
    ),
    Goal(GPU, "backward in place", "≥ 92% of it", bandwidth("backward"), 0.92, "{:.0%}"),
    Goal(
        GPU,
        "P3O's loss from logits",
        "≥ 5 × eager",
        speedups("logits", "eager".__eq__),
        5,
        "{:.1f} ×",
    ),
    Goal(
        GPU,
        SAME,
        "≥ 1.5 × torch.compile",
        speedups("logits", "torch.compile".__eq__),
        1.5,
        "{:.2f} ×",
    ),
    Goal(GPU, "its extra memory", "< 1% of the logits", extra_over_logits, 0.01, "{:.2%}", True),
    Goal(
        GPU,
        "P3O's loss from hidden states, V below 256,000",
        "≤ 1.10 × three bare products",
        products(BOTH, is_smaller),
        1.10,
        "{:.2f} ×",
        True,
    ),
    Goal(
        GPU,
        "the same, larger V",
        "≤ 1.17 × of them",
        products(BOTH, is_large),
        1.17,
        "{:.2f} ×",
        True,
    ),
    Goal(
        GPU,
        "the same, any V",
        "≥ 1.2 × peers that compute logits twice",
        speedups("hidden", eightfold),
        1.2,
        "{:.2f} ×",
    ),
    Goal(GPU, SAME, SLOWER, speedups("hidden", is_a_peer), 1.0, "{:.2f} ×"),
    Goal(
        GPU,
        "`linear_logprobs` and P3O's loss",
        "never slower than TRL's",
        speedups("hidden", "TRL".__eq__, LOGPROBS),
        1.0,
        "{:.2f} ×",
    ),
    Goal(GPU, SAME, "never larger than TRL's", larger_than_trl, 1.0, "{:.2f} ×", True),
    Goal(
        GPU,
        "extra memory of P3O's loss",
        "≤ 1.05 × 2 N V bytes",
        extra_over_need,
        1.05,
        "{:.2f} ×",
        True,
    ),
    Goal(GPU, "its time", "linear in N (within 5%)", time_growth, 1.05, "{:.2f} of linear", True),
    Goal(
        GPU,
        "frozen head",
        "≤ 1.15 × two bare products",
        products(f"frozen head, {BOTH}"),
        1.15,
        "{:.2f} ×",
        True,
    ),
    Goal(
        GPU,
        "shared-prompt packing, (350, 40), K 2",
        "≥ 1.6 × plain packing",
        over_plain,
        1.6,
        "{:.2f} ×",
    ),
    Goal(GPU, SAME, "≥ 3 × padded batches", over_padded, 3, "{:.2f} ×"),
    Goal(
        GPU,
        "update of 1 B, (350, 40)",
        "≥ 60% of its products' rate",
        share_of_products("update"),
        0.6,
        "{:.0%}",
    ),
    Goal(
        GPU,
        "log-probs of 1 B, (350, 40)",
        "≥ 60% of it",
        share_of_products("log-probs"),
        0.6,
        "{:.0%}",
    ),
    Goal(
        GPU, "rollouts, 128 responses of 1 B", "≥ 60% of their floor", share_of_floor, 0.6, "{:.0%}"
    ),
    Goal(GPU, "iteration of 1 B", "≥ 3 × TRL", over_trl, 3, "{:.2f} ×"),
    Goal(GPU, "reward of a run of 1 B, ten updates", "rises by 0.05", reward_gain, 0.05, "{:+.2f}"),
    Goal(CPU, "P3O's loss from logits", SLOWER, speedups("logits", is_a_peer), 1.0, "{:.2f} ×"),
    Goal(
        CPU,
        "P3O's loss from hidden states, fp32",
        SLOWER,
        speedups("hidden", is_a_peer, dtype="float32"),
        1.0,
        "{:.2f} ×",
    ),
    Goal(
        CPU,
        "`linear_logprobs` and P3O's loss, fp32",
        SLOWER,
        speedups("hidden", is_a_peer, LOGPROBS, dtype="float32"),
        1.0,
        "{:.2f} ×",
    ),
    Goal(
        CPU,
        "the head, even and ragged",
        "≤ 1.25 × three products",
        chosen("three products"),
        1.25,
        "{:.2f} ×",
        True,
    ),
    Goal(
        CPU,
        SAME,
        "≤ 1.03 × its time by torch's products",
        chosen(BY_TORCH),
        1.03,
        "{:.2f} ×",
        True,
    ),
    Goal(
        CPU,
        "rollouts, ragged (350, 40), K 2",
        "≥ 3 × generate",
        over_generate(**RAGGED),
        3,
        "{:.2f} ×",
    ),
    Goal(CPU, "rollouts, any shape", "≥ 1 × generate", over_generate(), 1, "{:.2f} ×"),
    Goal(
        CPU,
        "update, (350, 40)",
        "≥ 50% of its products' rate",
        share_of_products("update"),
        0.5,
        "{:.0%}",
    ),
    Goal(CPU, "log-probs, (350, 40)", "≥ 50% of it", share_of_products("log-probs"), 0.5, "{:.0%}"),
    Goal(CPU, "a whole iteration", "≥ 3 × TRL", over_trl, 3, "{:.2f} ×"),
]


def goals_table(results: Results) -> list[list[str]]:
    """Header first."""
    lines = [["device", "what", "goal", "measured", ""]]
    for goal in GOALS:
        measured, met = goal.verdict(results)
        lines.append(
            [goal.device, goal.what, goal.goal, measured, "" if met == NOT_MEASURED else met]
        )
    return lines
