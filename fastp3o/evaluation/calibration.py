"""Accuracy and calibration of a reward model: predicted probabilities σ(|r_w − r_l|) next to
observed shares.

The order of a pair says nothing. The prediction is the probability that the response with the
higher score is the better one, and the observation is whether it is; by soft labels, the share of
raters who say so. A preference model's log-odds take the place of r_w − r_l.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from fastp3o.evaluation.interval import share_interval

BINS = 10  # of equal width, from 1/2 to 1


def judged(pairs: Sequence[tuple[int, float, float]], prompt_of: Sequence[int]) -> dict[str, float]:
    """The accuracy's 95% interval, and the calibration error; empty if a difference is not finite.
    pairs: each one's record, r_w − r_l, and the labels' probability that the better response is
    better. prompt_of: a number for the prompt of each record. Accuracy is the share of pairs with
    the better response ahead, equal scores counting a half, averaged over records. Its interval is
    over prompts, since records of one prompt say less than as many of others.
    """
    values = np.array([difference for _, difference, _ in pairs])
    if not np.isfinite(values).all():
        return {}
    right = 0.5 + np.sign(values) * (np.array([probability for *_, probability in pairs]) - 0.5)
    records, of_pair = np.unique([number for number, *_ in pairs], return_inverse=True)
    shares = np.bincount(of_pair, right) / np.bincount(of_pair)
    _, of_record = np.unique([prompt_of[record] for record in records], return_inverse=True)
    low, high = share_interval(np.bincount(of_record, shares), np.bincount(of_record))
    return {
        "accuracy_low": low,
        "accuracy_high": high,
        "calibration_error": calibration_error(values, right),
    }


def numbered(prompts: Iterable[Sequence[int]]) -> list[int]:
    """A number for each prompt of token ids, the same for the same ids."""
    numbers: dict[tuple[int, ...], int] = {}
    return [numbers.setdefault(tuple(ids), len(numbers)) for ids in prompts]


def calibration_error(differences: np.ndarray, right: np.ndarray) -> float:
    """The expected calibration error: the mean distance of prediction and observation, bins
    weighted by their pairs.
    """
    predicted = 1 / (1 + np.exp(-np.abs(differences)))
    bins = np.minimum(((predicted - 0.5) * 2 * BINS).astype(int), BINS - 1)
    return float(np.abs(np.bincount(bins, predicted - right)).sum() / len(right))
