"""Bands by length: what each arm reaches by judge, and what each clips after one step of a real model."""

from typing import Any

import torch

from benchmarks.frontier.report.measures import estimate, number, rate
from benchmarks.frontier.runs import bands, bands_real
from benchmarks.frontier.runs.banded_p3o import ARMS, banded_p3o
from benchmarks.frontier.runs.bands import JUDGES
from benchmarks.frontier.runs.records import lines_of
from fastp3o.evaluation.matched_kl import Seed, interval, paired_difference
from fastp3o_kernels import Groups

FIXED = next(iter(ARMS))
LANGUAGES = "languages"
ENDS = {
    LANGUAGES: f"utility − {JUDGES[LANGUAGES].kl_coef:g} KL",
    "sums": "accuracy",
    "game": "digits found",
}
# Tokens of both responses of a pair of the real model.
PAIRS = ((16, 16), (16, 64), (32, 128), (128, 128))


def result(line: dict[str, Any]) -> float:
    """What a run ends at: ENDS of its judge."""
    last = line["evaluations"][-1]
    if line["judge"] == LANGUAGES:
        return last["gold"] - JUDGES[LANGUAGES].kl_coef * last["kl"]
    return last["reward/found" if line["judge"] == "game" else "reward"]


def table() -> list[list[str]]:
    """A line a judge and arm that has run: means over seeds. Header first."""
    rows = [["judge", "result", "arm", "pairs outside", "gradient left", "its mean", "less fixed"]]
    for judge, name in ENDS.items():
        lines = [line for line in lines_of(bands.RECORD) if line["judge"] == judge]
        for arm in ARMS:
            own = [line for line in lines if line["arm"] == arm]
            if own:
                lead = paired_difference(by_seed(lines, arm), by_seed(lines, FIXED))
                rows.append(
                    [
                        *(judge, name, arm),
                        *(mean_of(own, metric) for metric in ("clip_fraction", "gradient_left")),
                        estimate(interval(by_seed(lines, arm))),
                        "" if arm == FIXED else estimate(lead, signed=True),
                    ]
                )
    return rows


def by_seed(lines: list[dict[str, Any]], arm: str) -> dict[Seed, float]:
    return {("", line["seed"]): result(line) for line in lines if line["arm"] == arm}


def mean_of(lines: list[dict[str, Any]], metric: str) -> str:
    """Over seeds and the whole run."""
    courses = [line["course"][f"loss/{metric}"] for line in lines]
    return number(sum(map(sum, courses)) / sum(map(len, courses)))


def real_table() -> list[list[str]]:
    """A line a size of step and arm: pairs outside, and in brackets the gradient that is left, by
    the lengths of a pair. Header first.
    """
    rows = [
        ["step", "log-ratio of 16, 128 tokens", "arm", *(f"{a} and {b} tokens" for a, b in PAIRS)]
    ]
    lines = {line["step"]: line for line in lines_of(bands_real.RECORD)}
    for line in (lines[step] for step in bands_real.STEPS if step in lines):
        log_ratios = torch.tensor(line["log_ratios"], dtype=torch.float64)
        sizes = log_ratios.square().mean(0).sqrt()[[0, -1]].tolist()
        for arm in ARMS:
            shares = [clipped(line, arm, *pair) for pair in PAIRS]
            rows.append(
                [
                    rate(line["step"]),
                    ", ".join(f"{size:.2g}" for size in sizes),
                    arm,
                    *(f"{number(outside)} ({number(left)})" for outside, left in shares),
                ]
            )
    return rows


def clipped(line: dict[str, Any], arm: str, first: int, second: int) -> tuple[float, float]:
    """(Share of pairs outside, gradient left) of all ordered pairs of responses to a prompt, cut to
    `first` and `second` tokens.
    """
    rewards = torch.tensor(line["rewards"], dtype=torch.float64)
    P, K = rewards.shape
    log_ratios = torch.tensor(line["log_ratios"], dtype=torch.float64).view(P, K, -1)
    whole = torch.tensor(line["lengths"]).view(P, K)
    pairs = [(p, i, j) for p in range(P) for i in range(K) for j in range(K) if i != j]
    places = [bands_real.LENGTHS.index(length) for length in (first, second)]
    moved = [[log_ratios[p, k, n] for k, n in zip(ij, places, strict=True)] for p, *ij in pairs]
    lengths = [
        [min(size, int(whole[p, k])) for k, size in zip(ij, (first, second), strict=True)]
        for p, *ij in pairs
    ]
    groups, old = groups_of(torch.tensor(moved), torch.tensor(lengths))
    given = torch.stack([rewards[p, ij] for p, *ij in pairs])
    _, metrics = banded_p3o(groups, old, old, given, **ARMS[arm])
    return tuple(float(metrics[name]) / len(pairs) for name in ("clip_fraction", "gradient_left"))  # type: ignore[return-value]


def groups_of(log_ratios: torch.Tensor, lengths: torch.Tensor) -> tuple[Groups, torch.Tensor]:
    """Groups of two responses whose sums are these log-ratios, [n, 2], and old ones of 0."""
    offsets = torch.cat([lengths.new_zeros(1), lengths.flatten().cumsum(0)])
    per_token = (log_ratios / lengths).flatten().repeat_interleave(lengths.flatten())
    return Groups(per_token, offsets, 2, {}), torch.zeros_like(log_ratios)
