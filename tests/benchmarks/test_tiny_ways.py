"""The ways that are timed against each other train and sample, at tiny sizes."""

from types import SimpleNamespace

import pytest

from benchmarks import test_rollouts
from benchmarks.iteration_trainers import PHASES, TRAINERS, Stopwatch, Task, save_model
from benchmarks.rollout_ways import WAYS, Rollouts
from benchmarks.test_iteration import Iteration, random_prompts
from benchmarks.training_shapes import llama

TINY = 32, 48, 2, 4, 2, 61


@pytest.fixture
def policy():
    policy = test_rollouts.random_policy(llama(*TINY))
    policy.model.generation_config.eos_token_id = list(range(6))
    return policy


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_way_samples_responses_that_end_where_they_should(policy, way):
    if "TRL" in way:
        pytest.importorskip("trl")
    case = Rollouts("tiny", 9, 7, 10, 2, P=3)
    prompts = test_rollouts.random_prompts(case, 61)
    sampled = WAYS[way](policy, prompts, case, 0)
    assert [len(group) for group in sampled] == [2, 2, 2]
    for ids in (ids for group in sampled for ids in group):
        assert len(ids) == 7 or ids[-1] < 6
        assert min(ids[:-1], default=6) >= 6


def test_continuous_batching_keeps_its_manager_while_the_case_is_the_same(policy):
    case = Rollouts("tiny", 9, 7, 10, 2, P=3)
    managers = []
    for each in (case, case, case._replace(response=9)):
        sampled = WAYS["generate_batch"](policy, test_rollouts.random_prompts(each, 61), each, 0)
        assert len(sampled) == each.P
        managers.append(policy.model._cached_continuous_batching_manager)
    assert managers[0] is managers[1] is not managers[2]


def test_trl_samples_from_a_model_that_keeps_a_manager(policy):
    pytest.importorskip("trl")
    case = Rollouts("tiny", 9, 7, 10, 2, P=3)
    prompts = test_rollouts.random_prompts(case, 61)
    WAYS["generate_batch"](policy, prompts, case, 0)
    assert [len(group) for group in WAYS["TRL GRPO"](policy, prompts, case, 0)] == [2, 2, 2]


@pytest.mark.parametrize("slow", ["generate_batch", "TRL GRPO"])
def test_no_ways_first_call_counts(policy, slow, monkeypatch):
    """However long it takes: it builds caches and captures graphs."""
    ms = iter([900.0, 9.0] + [1.0, 1.0] * 99)
    monkeypatch.setattr(test_rollouts, "milliseconds", lambda call: (call(), next(ms))[1])
    monkeypatch.setitem(test_rollouts.WAYS, slow, WAYS["generate"])
    measurement = test_rollouts.Measurement(policy, Rollouts("tiny", 9, 3, None, 2, P=2), slow)

    def pedantic(run, rounds):
        for _ in range(rounds):
            run()

    measurement.run(SimpleNamespace(pedantic=pedantic))
    assert measurement.figures.ms == {slow: [1.0], "generate": [1.0]}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_trains(name, tmp_path):
    if "TRL" in name:
        pytest.importorskip("trl")
    task = Task(tmp_path / "model", random_prompts(Iteration("tiny", 4, 9, 5, 2), 61), 5, 2, 2)
    save_model(llama(*TINY), task.model)
    measured = TRAINERS[name](task, 2, tmp_path, Stopwatch())
    assert len(measured) == 2
    for iteration in measured:
        assert list(iteration) == ["seconds"] if "TRL" in name else ["seconds", *PHASES, "other"]
        assert min(iteration.values()) > 0
