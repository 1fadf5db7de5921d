"""Combinations of a test's parameters, of which the suite runs a sample."""

from itertools import combinations, product

import pytest


def pairwise(*factors: list) -> list:
    """All combinations of a value of each factor. Those that run every time have every pair of
    values of two factors together; the others run nightly.
    """
    every = list(product(*map(enumerate, factors)))
    pairs = {
        combination: set(
            combinations([(factor, number) for factor, (number, _) in enumerate(combination)], 2)
        )
        for combination in every
    }
    chosen, seen = set(), set()
    while left := max((pairs[combination] - seen for combination in every), key=len):
        chosen.add(next(combination for combination in every if pairs[combination] - seen == left))
        seen |= left
    return [
        pytest.param(
            *(own for _, own in combination),
            marks=() if combination in chosen else (pytest.mark.nightly,),
        )
        for combination in every
    ]
