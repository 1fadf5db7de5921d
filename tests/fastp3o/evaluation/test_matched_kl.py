import math

import numpy as np
import pytest

from fastp3o.evaluation import matched_kl
from fastp3o.evaluation.matched_kl import gain_at_kl, interval, paired_difference, t_quantile


def run(*points, start=1.0):
    """Evaluations from (KL, gain) at updates 0, 1, 2, ..."""
    return [{"step": step, "kl": kl, "reward": start + gain} for step, (kl, gain) in enumerate(points)]


def test_the_gain_lies_on_the_line_between_the_evaluations_around_the_first_crossing_or_is_none():
    evaluations = run((0.0, 0.0), (0.5, 0.2), (1.5, 0.8), (3.0, 1.0))
    assert gain_at_kl(evaluations, 1.0) == pytest.approx(0.5)
    assert gain_at_kl(evaluations, 1.5) == pytest.approx(0.8)
    assert gain_at_kl(evaluations, 2.25) == pytest.approx(0.9)
    assert gain_at_kl(run((0, 0), (0.5, 0.1), (1.5, 0.3), (0.8, 0.2), (1.2, 9.0)), 1.0) == pytest.approx(0.2)
    evaluations = run((0.0, 0.0), (1.5, 0.8), (0.5, 0.6), (2.0, 0.9))
    assert gain_at_kl(evaluations, 1.0) is None, "between the start and a late first evaluation"
    assert gain_at_kl(evaluations, 2.5) is None, "never reached"
    assert gain_at_kl(evaluations[:1], 1.0) is None
    evaluations = [e | {"gold": 2 * e["reward"]} for e in run((0, 0), (0.5, 0.2), (1.5, 0.8), start=10.0)]
    assert gain_at_kl(evaluations, 1.0, metric="gold") == pytest.approx(1.0)
    with pytest.raises(ValueError, match="step 0"):
        gain_at_kl(evaluations[1:], 1.0)


def test_quantiles_of_student_are_those_of_the_tables_and_too_few_seeds_have_no_interval():
    for tail, degrees, tabulated in ((0.025, 1, 12.7062), (0.0005, 30, 3.6460), (0.05, 120, 1.6577)):
        assert t_quantile(tail, degrees) == pytest.approx(tabulated, abs=6e-5)
    assert interval([[1.0, 3.0]]) == (2.0, -math.inf, math.inf, 2)
    assert interval([[1.0], [3.0, 3.0, 3.0, 3.0]])[1:3] == (-math.inf, math.inf)


def coverage(draw, mean, seeds, tasks, comparisons=1):
    estimates = [interval([draw(seeds) for _ in range(tasks)], comparisons) for _ in range(1000)]
    return np.mean([estimate.low <= mean <= estimate.high for estimate in estimates])


def test_intervals_of_eight_seeds_cover_what_they_promise(monkeypatch):
    monkeypatch.setattr(matched_kl, "RESAMPLES", 4000)
    matched_kl._resampling.cache_clear()
    generator = np.random.default_rng(0)
    normal, skewed = generator.standard_normal, lambda size: generator.gamma(4.0, size=size)
    try:
        assert 0.92 < coverage(normal, 0.0, seeds=8, tasks=1) < 0.97
        assert 0.91 < coverage(skewed, 4.0, seeds=8, tasks=1) < 0.97
        assert 0.91 < coverage(normal, 0.0, seeds=4, tasks=2) < 0.97
        assert coverage(normal, 0.0, seeds=8, tasks=1, comparisons=40) > 0.992
    finally:
        matched_kl._resampling.cache_clear()


def test_tasks_that_differ_do_not_widen_the_interval():
    values = np.random.default_rng(1).standard_normal((2, 8))
    apart = values + np.array([[0.0], [100.0]])
    together, stratified = interval([values.ravel()]), interval(apart)
    assert stratified.mean == pytest.approx(together.mean + 50)
    assert stratified.high - stratified.low == pytest.approx(together.high - together.low, rel=0.2)
    assert interval([apart.ravel()]).high - interval([apart.ravel()]).low > 50


def test_pairs_are_of_the_same_task_and_seed_and_both_measured():
    first = {(task, seed): seed + 0.5 for task in "ab" for seed in range(6)}
    second = {(task, seed): float(seed) for task in "ba" for seed in range(5)} | {("a", 0): None, ("c", 9): 100.0}
    assert paired_difference(first, second) == (0.5, 0.5, 0.5, 9)
    assert paired_difference({("a", 0): 1.0}, {("b", 0): 1.0}) is None
