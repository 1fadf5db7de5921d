"""Intervals by resampling: the percentile bootstrap (Efron 1979) of a ratio of sums."""

import numpy as np


def percentile_interval(
    numerators: np.ndarray,
    denominators: np.ndarray,
    *,
    seed: int,
    resamples: int = 10_000,
    confidence: float = 0.95,
) -> tuple[float, float]:
    """Interval of sum(numerators) / sum(denominators) over units that are resampled with replacement.

    Args:
        numerators, denominators: [n], one entry for each unit; dependent values must be in the same unit.
            Denominators are above 0 (ones give the interval of a mean).
        seed: equal seeds give equal intervals.
        confidence: share of the resampled ratios within the interval.

    Returns:
        Low and high end. Units with equal ratios give an interval of zero width, however few they are.
    """
    random = np.random.default_rng(seed)
    units = len(numerators)
    ratios = np.empty(resamples)
    for resample in range(resamples):
        drawn = random.integers(units, size=units)
        ratios[resample] = numerators[drawn].sum() / denominators[drawn].sum()
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)
