"""Raters who go in circles by a degree that is set."""

import json

import numpy as np
import pytest

from benchmarks.frontier.runs import circles as runs
from benchmarks.frontier.tasks import circles
from benchmarks.frontier.tasks.circles import Raters, win_rate, worst_case


@pytest.fixture(scope="module")
def responses() -> np.ndarray:
    """Features of two of the language's responses to each prompt, [2, 1000, 3]."""
    raters, rng = Raters(0, 0.5), np.random.default_rng(1)
    prompts = raters.language.prompts(1000, rng)
    return np.stack([raters.features(prompts, raters.responses(prompts, rng)) for _ in range(2)])


def test_the_degree_is_the_share_of_circles_and_leaves_the_noise_as_it_is(responses):
    first, second = responses
    spread = {}
    for degree in (0.0, 0.5, 1.0):
        preferred = Raters(0, degree).preferred(first, second)
        np.testing.assert_allclose(preferred, 1 - Raters(0, degree).preferred(second, first))
        spread[degree] = np.log(preferred / (1 - preferred)).std()
    assert max(spread.values()) < 1.15 * min(spread.values())
    # At 0 the better utility wins; at 1 it says nothing.
    agree = [
        np.mean((first > second)[:, 0] == (Raters(0, degree).preferred(first, second) > 0.5))
        for degree in (0, 1)
    ]
    assert agree[0] == 1
    assert 0.4 < agree[1] < 0.6


def test_three_responses_around_the_circle_beat_one_another():
    angles = 2 * np.pi * np.arange(3) / 3
    around = 2 * np.stack([np.zeros(3), np.cos(angles), np.sin(angles)], axis=1)
    table = Raters(0, 1.0).preferred(around[:, None], around)
    assert [table[i, (i + 1) % 3] > 0.95 for i in range(3)] == [True] * 3
    policies = {"one": around[None, [0, 0, 0, 0, 0, 0]], "all": around[None, [0, 1, 2, 0, 1, 2]]}
    raters, replies = Raters(0, 1.0), around[None]
    assert worst_case(raters, policies["one"], replies) < 0.05
    assert worst_case(raters, policies["all"], replies) == pytest.approx(0.5)
    assert win_rate(raters, policies["one"], policies["all"]) == pytest.approx(0.5)


def test_a_language_and_degree_is_recorded(tmp_path, monkeypatch):
    """In small: two arms, two updates."""
    monkeypatch.setattr(circles, "SIZES", dict.fromkeys(circles.SIZES, 16))
    monkeypatch.setattr(circles, "SFT", circles.SFT | {"epochs": 1, "warmup_steps": 0})
    monkeypatch.setattr(
        circles, "REWARD_MODEL", circles.REWARD_MODEL | {"epochs": 1, "warmup_steps": 0}
    )
    monkeypatch.setattr(
        runs, "ARMS", {name: arm for name, arm in runs.ARMS.items() if "P3O" in name}
    )
    monkeypatch.setattr(runs, "SETTINGS", runs.SETTINGS | {"updates": 2, "prompts_per_update": 8})
    line = json.loads(json.dumps(runs.play(0, 0.5, tmp_path)))
    names = [runs.START, *runs.ARMS, *map(runs.averaged_name, runs.AVERAGED)]
    assert [*line["win_rates"]] == [*line["worst_case"]] == names
    for name, rates in line["win_rates"].items():
        assert rates[name] == pytest.approx(0.5, abs=1e-3)
        assert rates[runs.START] == pytest.approx(1 - line["win_rates"][runs.START][name], abs=2e-4)
    assert {*line["reward_models"]} == {*runs.MODELS}
