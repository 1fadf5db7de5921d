"""Student's 95% intervals: of means over seeds, prompts or pairs, and of ratios of sums over them."""

import math
from functools import lru_cache

import numpy as np

LEVEL = 0.95


def half_width(errors: np.ndarray, degrees: int) -> float:
    """Half of the interval of a mean, infinite without a degree of freedom. errors: [n], of the
    values from what is estimated for each. degrees: of freedom, n less the number of estimates.
    """
    if not degrees:
        return math.inf
    variance = float(np.square(errors).sum()) / degrees
    return t_quantile((1 - LEVEL) / 2, degrees) * math.sqrt(variance / len(errors))


def share_interval(parts: np.ndarray, wholes: np.ndarray) -> tuple[float, float]:
    """The interval of sum(parts) / sum(wholes), within 0 and 1, over units, [n] each, that do not
    depend on each other. The ratio's errors are those of its linear expansion (Cochran 1977,
    section 6).
    """
    share = float(parts.sum() / wholes.sum())
    half = half_width((parts - share * wholes) / wholes.mean(), len(parts) - 1)
    return max(0.0, share - half), min(1.0, share + half)


@lru_cache
def t_quantile(tail: float, degrees: int) -> float:
    """The t that a variable of Student's distribution with `degrees` of freedom exceeds with
    probability `tail`.
    """
    # In terms of the angle of t / √degrees the density is cos to the power of degrees − 1, smooth
    # and bounded.
    angles = np.linspace(math.pi / 2, 0, 2**16 + 1)
    density = np.cos(angles) ** (degrees - 1)
    # Its integral from π / 2, where t is infinite, by trapezoids of a common factor: half of all
    # lies between that and an angle of 0.
    beyond = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    share_of_half = beyond / beyond[-1]
    angle = float(np.interp(2 * tail, share_of_half, angles))
    return math.sqrt(degrees) * math.tan(angle)
