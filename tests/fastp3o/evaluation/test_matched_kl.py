import math

import numpy as np
import pytest

from fastp3o.evaluation.interval import t_quantile
from fastp3o.evaluation.matched_kl import gain_at_kl, interval, paired_difference


def run(*points, start=1.0):
    """Evaluations from (KL, gain) at updates 0, 1, 2, ..."""
    return [
        {"step": step, "kl": kl, "reward": start + gain} for step, (kl, gain) in enumerate(points)
    ]


def by_task(strata):
    return {
        (str(task), seed): value
        for task, values in enumerate(strata)
        for seed, value in enumerate(values)
    }


def test_the_gain_lies_on_the_line_between_the_evaluations_around_the_first_crossing_or_is_none():
    evaluations = run((0.0, 0.0), (0.5, 0.2), (1.5, 0.8), (3.0, 1.0))
    assert gain_at_kl(evaluations, 1.0) == pytest.approx(0.5)
    assert gain_at_kl(evaluations, 1.5) == pytest.approx(0.8)
    assert gain_at_kl(evaluations, 2.25) == pytest.approx(0.9)
    assert gain_at_kl(
        run((0, 0), (0.5, 0.1), (1.5, 0.3), (0.8, 0.2), (1.2, 9.0)), 1.0
    ) == pytest.approx(0.2)
    evaluations = run((0.0, 0.0), (1.5, 0.8), (0.5, 0.6), (2.0, 0.9))
    assert gain_at_kl(evaluations, 1.0) is None, "between the start and a late first evaluation"
    assert gain_at_kl(evaluations, 2.5) is None, "never reached"
    assert gain_at_kl(evaluations[:1], 1.0) is None
    evaluations = [
        e | {"gold": 2 * e["reward"]} for e in run((0, 0), (0.5, 0.2), (1.5, 0.8), start=10.0)
    ]
    assert gain_at_kl(evaluations, 1.0, metric="gold") == pytest.approx(1.0)
    with pytest.raises(ValueError, match="step 0"):
        gain_at_kl(evaluations[1:], 1.0)


def test_quantiles_of_student_are_those_of_the_tables_and_too_few_seeds_have_no_interval():
    for tail, degrees, tabulated in (
        (0.025, 1, 12.7062),
        (0.0005, 30, 3.6460),
        (0.05, 120, 1.6577),
    ):
        assert t_quantile(tail, degrees) == pytest.approx(tabulated, abs=6e-5)
    assert interval({("a", 0): 1.0, ("b", 0): 3.0, ("b", 1): None}) == (2.0, -math.inf, math.inf, 2)
    assert interval(by_task([[1.0, 2.0, 6.0]]))[:3] == pytest.approx(
        (3.0, 3 - 4.30265 * 7**0.5 / 3**0.5, 3 + 6.57245), abs=1e-4
    )


@pytest.mark.parametrize(("seeds", "tasks", "skewed"), [(8, 1, False), (8, 1, True), (4, 2, False)])
def test_intervals_of_eight_seeds_cover_what_they_promise(seeds, tasks, skewed):
    generator = np.random.default_rng(0)
    draw = (
        (lambda size: generator.gamma(4.0, size=size) - 4) if skewed else generator.standard_normal
    )
    estimates = [interval(by_task([draw(seeds) for _ in range(tasks)])) for _ in range(4000)]
    assert 0.92 < np.mean([estimate.low <= 0 <= estimate.high for estimate in estimates]) < 0.965


def test_tasks_that_differ_do_not_widen_the_interval():
    values = np.random.default_rng(1).standard_normal((2, 8))
    apart = values + np.array([[0.0], [100.0]])
    together, stratified = interval(by_task([values.ravel()])), interval(by_task(apart))
    assert stratified.mean == pytest.approx(together.mean + 50)
    assert stratified.high - stratified.low == pytest.approx(together.high - together.low, rel=0.2)
    whole = interval(by_task([apart.ravel()]))
    assert whole.high - whole.low > 50


def test_pairs_are_of_the_same_task_and_seed_and_both_measured():
    first = {(task, seed): seed + 0.5 for task in "ab" for seed in range(6)}
    second = {(task, seed): float(seed) for task in "ba" for seed in range(5)} | {
        ("a", 0): None,
        ("c", 9): 100.0,
    }
    assert paired_difference(first, second) == (0.5, 0.5, 0.5, 9)
    assert paired_difference({("a", 0): 1.0}, {("b", 0): 1.0}) is None
