"""Rewards by name, their weighted sum with its parts, the penalties that are subtracted from it,
and their scale.
"""

import pytest
import torch

from fastp3o.rewards.config import PenaltyConfig, cascaded, reward_names, short_names
from fastp3o.rewards.reward import (
    WeightedSum,
    penalized_rewards,
    penalties,
    repeated_share,
    rewarded,
)
from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler, Scaler, differences
from fastp3o.rollouts.groups import Group, Prompt, Response


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
    # A reward that is only watched counts for nothing.
    not_finite = torch.tensor([[torch.nan, 1], [torch.inf, 0]])
    watched = WeightedSum({"a:f": first, "b:g": lambda rollouts: not_finite}, [1.0, 0.0])
    assert torch.equal(watched(rollouts), first(rollouts))


@pytest.mark.parametrize("reward", [first, WeightedSum({"a:f": first, "b:g": second}, [1.0, 0.0])])
def test_penalties_are_subtracted_and_told(rollouts, reward):
    config = PenaltyConfig(missing_eos_penalty=0.5, length_penalty=0.25)
    values = penalized_rewards(reward, rollouts, config, longest=8)
    # " aei" and its end, " xyz" without one, " o" and " u" with theirs
    assert values["reward"].tolist() == [[1 - 1.25, 2 - 0.5 - 1], [3 - 0.75, 4 - 0.75]]
    assert [name for name in values if name.startswith("penalty")] == [
        "penalty/missing_eos",
        "penalty/length",
    ]
    assert ("reward/b:g" in values) == (reward is not first)


def test_each_penalty_by_hand():
    responses = [[5, 0], [5, 6, 5, 6, 5, 6], [7, 7, 7, 0], [1, 2, 3, 4, 5, 6, 7, 8]]
    groups = [Group(Prompt("", [1]), [Response(ids, "", ids[-1] == 0) for ids in responses])]
    ngrams = {"ngram_penalty": 10.0, "ngram_length": 2}
    lengths = {"length_penalty": 0.5, "length_penalty_after": 3, "overlong_margin": 4}
    config = PenaltyConfig(missing_eos_penalty=2.0, **lengths, **ngrams)
    found = {name: values.tolist() for name, values in penalties(groups, config, longest=8).items()}
    assert found == {
        "penalty/missing_eos": [[0, 2, 0, 2]],
        "penalty/length": [[0, 1.5, 0.5, 2.5]],
        # 5 6, 6 5, 5 6, 6 5, 5 6: two of five are different; 7 7, 7 7, 7 0: two of three
        "penalty/ngram": [[0, pytest.approx(6), pytest.approx(10 / 3), 0]],
        "penalty/overlong": [[0, 0.5, 0, 1]],
    }
    assert penalties(groups, PenaltyConfig(), longest=8) == {}
    assert repeated_share([5], 2) == 0
    assert repeated_share([5, 5], 1) == 0.5


def test_a_name_is_shortened_to_its_last_part_unless_others_have_the_same():
    names = reward_names("rules:check else runs/rm/model,https://judge/score")
    assert [cascaded(name) for name in names] == [
        ["rules:check", "runs/rm/model"],
        ["https://judge/score"],
    ]
    assert short_names(names) == ["check else model", "score"]
    assert short_names(["rewards:vowels", "runs/rm/model/", "owner/name"]) == [
        "vowels",
        "model",
        "name",
    ]
    alike = ["runs/a/model", "runs/b/model"]
    assert short_names([*alike, "math:correct"]) == [*alike, "correct"]
    assert short_names(["/", "."]) == ["/", "."]


def on_grid(*shape):
    return torch.randint(-64, 64, shape) / 16


@pytest.mark.parametrize(("scale", "K"), [(True, 2), (True, 4), (False, 3)])
def test_a_shift_per_prompt_changes_differences_in_no_bit_and_absolute_rewards_in_value(scale, K):
    plain, shifted = DifferenceScaler(2.0, scale=scale), DifferenceScaler(2.0, scale=scale)
    for _ in range(3):
        rewards = on_grid(8, K)
        assert torch.equal(plain(rewards), shifted(rewards + 1024 * on_grid(8, 1)))
    absolute, moved = (
        AbsoluteScaler(10.0)(rewards),
        AbsoluteScaler(10.0)(rewards + 16 * on_grid(8, 1)),
    )
    assert not torch.allclose(differences(absolute), differences(moved), atol=1e-3)


def test_no_difference_of_many_responses_exceeds_the_bound():
    rewards = torch.randn(64, 5)
    scaled = DifferenceScaler(1.0)(rewards)
    assert differences(scaled).abs().max() <= 1
    loose = DifferenceScaler(100.0)(rewards)
    torch.testing.assert_close(
        differences(loose), differences(rewards) / differences(rewards).square().mean().sqrt()
    )


def scales(
    kind: type[Scaler], K: int, outliers: dict[int, float], updates: int = 60, scale: float = 1.0
) -> list[float]:
    """The deviation after each update of eight prompts, one of whose rewards is an outlier in some."""
    generator, scaler, found = torch.Generator().manual_seed(0), kind(10.0), []
    for update in range(updates):
        rewards = scale * torch.randn(8, K, generator=generator)
        if update in outliers:
            rewards[3, 1] = outliers[update]
        assert scaler(rewards).isfinite().all()
        assert (scaler.outlier is not None) == (update in outliers)
        found.append(scaler.std())
    return found


@pytest.mark.parametrize("kind", [DifferenceScaler, AbsoluteScaler])
@pytest.mark.parametrize("K", [2, 4, 8])
@pytest.mark.parametrize("far", [-1000.0, 1e6, 1e30])
@pytest.mark.parametrize("at", [0, 1, 10, 40])
def test_one_outlier_does_not_make_all_later_rewards_small(kind, K, far, at):
    """Also not in the very first update. Without one there is no difference in any bit."""
    plain, found = scales(kind, K, {}), scales(kind, K, {at: far})
    assert max(after / before for after, before in zip(found, plain, strict=True)) < 4
    assert found[-1] / plain[-1] < (1.5 if at < 40 else 1.6)
    assert found[:at] == plain[:at]


@pytest.mark.parametrize("kind", [DifferenceScaler, AbsoluteScaler])
def test_a_scale_that_changes_and_a_rare_reward_enter_the_deviation(kind):
    """What comes again and again is no outlier: neither successes in one of hundred prompts, nor
    another reward.
    """
    scaler = kind(10.0)
    scaler(0.01 * torch.randn(8, 4))
    for _ in range(200):
        scaler(torch.randn(8, 4))
    assert scaler.outlier is None
    assert scaler.std() == pytest.approx(2**0.5 if kind is DifferenceScaler else 1.0, rel=0.1)
    scaler, plain = kind(10.0), []
    for update in range(600):
        rewards = 0.01 * torch.randn(8, 2)
        rewards[0, 0] += update % 13 == 0
        plain.append(rewards if kind is AbsoluteScaler else differences(rewards))
        scaler(rewards)
    assert scaler.std() == pytest.approx(torch.cat(plain).std().item(), rel=0.2)


def test_an_outlier_of_unscaled_rewards_is_only_bounded():
    scaler = DifferenceScaler(10.0, scale=False)
    rewards = torch.randn(16, 2)
    rewards[0, 0] = 1e6
    assert scaler(rewards)[0].tolist() == [5.0, -5.0]
    assert scaler.outlier is None


def test_statistics_run_over_calls_and_are_saved():
    scaler = DifferenceScaler(0.0)
    assert torch.equal(scaler(torch.ones(1, 2)), torch.zeros(1, 2))
    scaler(torch.tensor([[3.0, 0.0]]))
    restored = DifferenceScaler(0.0)
    restored.load_state_dict(scaler.state_dict())
    rewards = torch.tensor([[4.0, 0.0]])
    assert torch.equal(scaler(rewards), restored(rewards))
    assert scaler.deviation_around(0.0) == pytest.approx((25 / 3) ** 0.5)
