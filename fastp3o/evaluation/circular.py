"""Preferences that go in circles: a beats b, b beats c, c beats a. Scores have none."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch

from fastp3o.models.preference import log_odds_of_groups

Ids = tuple[int, ...]


class Compared(NamedTuple):
    """Responses to a prompt from best to worst, their vectors, and the labels' probability of that
    order.
    """

    prompt: Ids
    responses: list[Ids]
    vectors: list[list[float]]
    probability: float


def circular_triples(records: Sequence[Compared]) -> dict[str, float]:
    """`circular_triples`, the share of a prompt's triples of responses that a preference model
    orders in a circle, over all prompts; `labeled_circular_triples`, that of the labels. Records
    with the same prompt are put together. Absent where no three responses were compared.
    """
    by_prompt: dict[Ids, list[Compared]] = defaultdict(list)
    for record in records:
        by_prompt[record.prompt].append(record)
    shares = {
        "circular_triples": circular_share(map(predicted_wins, by_prompt.values())),
        "labeled_circular_triples": circular_share(map(labeled_wins, by_prompt.values())),
    }
    return {name: share for name, share in shares.items() if share is not None}


def predicted_wins(records: Sequence[Compared]) -> np.ndarray:
    """Which of a prompt's n different responses is ahead of which by the vectors, [n, n] bool."""
    vectors = {
        ids: v
        for record in records
        for ids, v in zip(record.responses, record.vectors, strict=True)
    }
    return log_odds_of_groups(torch.tensor([[*vectors.values()]]))[0].numpy() > 0


def labeled_wins(records: Sequence[Compared]) -> np.ndarray:
    """Which of a prompt's n different responses most labels prefer to which, [n, n] bool."""
    places: dict[Ids, int] = {}
    for record in records:
        for ids in record.responses:
            places.setdefault(ids, len(places))
    lead = np.zeros((len(places), len(places)))
    for record in records:
        for better, worse in combinations([places[ids] for ids in record.responses], 2):
            lead[better, worse] += record.probability - 0.5
            lead[worse, better] -= record.probability - 0.5
    return lead > 0


def circular_share(wins: Iterable[np.ndarray]) -> float | None:
    """The share of circles among triples of which each pair is decided; None without such a triple.
    wins: tables [n, n] bool, never true at [i, j] and [j, i]. The traces of third powers count each
    circle 3 times, each triple 6 times.
    """
    circles = triples = 0.0
    for table in wins:
        won = table.astype(float)
        decided = won + won.T
        circles += np.trace(won @ won @ won) / 3
        triples += np.trace(decided @ decided @ decided) / 6
    return float(circles / triples) if triples else None
