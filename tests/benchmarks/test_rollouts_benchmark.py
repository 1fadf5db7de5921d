import pytest

from benchmarks import test_rollouts
from benchmarks.rollout_ways import WAYS, Rollouts
from benchmarks.training_shapes import llama


@pytest.fixture
def policy(monkeypatch):
    monkeypatch.setattr(test_rollouts, "PROMPTS", 3)
    policy = test_rollouts.random_policy(llama(32, 48, 2, 4, 2, 61))
    policy.model.generation_config.eos_token_id = list(range(6))
    return policy


@pytest.mark.parametrize("way", sorted(WAYS))
def test_every_way_samples_responses_that_end_where_they_should(policy, way):
    if "TRL" in way:
        pytest.importorskip("trl")
    case = Rollouts("tiny", 9, 7, 10, 2)
    prompts = test_rollouts.random_prompts(case, 61)
    sampled = WAYS[way](policy, prompts, case, 0)
    assert [len(group) for group in sampled] == [2, 2, 2]
    for ids in (ids for group in sampled for ids in group):
        assert len(ids) == 7 or ids[-1] < 6
        assert min(ids[:-1], default=6) >= 6


def test_tokens_that_are_read():
    prompts = [[1] * 5, [1] * 3]
    responses = [[[1] * 4, [1]], [[1] * 2, [1] * 2]]
    case = Rollouts("tiny", 4, 10, None, 2)
    engine = test_rollouts.counts("fastp3o engine", prompts, responses, case)
    assert engine == {"tokens": 9, "steps": 4, "read_per_token": ((4 * 4 + 2 * 2) + (10 + 1 + 3 + 3)) / 9}
    assert test_rollouts.counts("generate", prompts, responses, case) == {"tokens": 9, "steps": 4}
