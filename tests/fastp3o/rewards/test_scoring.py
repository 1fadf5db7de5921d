import pytest
import torch

from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.reward import WeightedSum, penalised_rewards, rewarded


def first(rollouts):
    return torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def second(rollouts):
    return torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)


def test_a_sum_is_scored_with_its_parts_and_a_single_reward_alone(rollouts):
    total = WeightedSum({"a:f": first, "b:g": second}, [1.0, -0.5])
    values = rewarded({"reward": total, "gold": first}, rollouts)
    assert list(values) == ["reward", "reward/a:f", "reward/b:g", "gold"]
    assert values["reward"].tolist() == total(rollouts).tolist() == [[0.5, 2.0], [3.0, 3.0]]
    assert values["reward/b:g"].tolist() == second(rollouts).tolist()
    assert rewarded({"reward": first}, rollouts).keys() == {"reward"}


def test_a_single_reward_may_have_a_weight(rollouts):
    assert WeightedSum({"a:f": first}, [-2.0])(rollouts).tolist() == [[-2, -4], [-6, -8]]


def test_a_reward_that_is_only_watched_counts_for_nothing(rollouts):
    for watched in (second, lambda rollouts: torch.tensor([[torch.nan, 1], [torch.inf, 0]])):
        assert torch.equal(WeightedSum({"a:f": first, "b:g": watched}, [1.0, 0.0])(rollouts), first(rollouts))


@pytest.mark.parametrize("reward", [first, WeightedSum({"a:f": first, "b:g": second}, [1.0, 0.0])])
def test_penalties_are_subtracted_and_told(rollouts, reward):
    config = PenaltyConfig(missing_eos_penalty=0.5, length_penalty=0.25)
    values = penalised_rewards(reward, rollouts, config, longest=8)
    # " aei" and its end, " xyz" without one, " o" and " u" with theirs
    assert values["reward"].tolist() == [[1 - 1.25, 2 - 0.5 - 1], [3 - 0.75, 4 - 0.75]]
    assert [name for name in values if name.startswith("penalty")] == ["penalty/missing_eos", "penalty/length"]
    assert ("reward/b:g" in values) == (reward is not first)


def test_without_penalties_rewards_are_what_they_were(rollouts):
    values = penalised_rewards(first, rollouts, PenaltyConfig(), longest=8)
    assert values.keys() == {"reward"}
    assert torch.equal(values["reward"], first(rollouts))
