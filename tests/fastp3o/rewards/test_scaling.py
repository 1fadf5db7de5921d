import pytest
import torch

from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler, differences


def on_grid(*shape):
    return torch.randint(-64, 64, shape) / 16


@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("K", [2, 3, 4])
def test_a_shift_per_prompt_changes_nothing(scale, K):
    plain, shifted = DifferenceScaler(2.0, scale=scale), DifferenceScaler(2.0, scale=scale)
    for _ in range(3):
        rewards = on_grid(8, K)
        assert torch.equal(plain(rewards), shifted(rewards + 1024 * on_grid(8, 1)))


def test_absolute_scaling_is_not_invariant():
    rewards = on_grid(8, 2)
    plain = AbsoluteScaler(10.0)(rewards)
    shifted = AbsoluteScaler(10.0)(rewards + 16 * on_grid(8, 1))
    assert not torch.allclose(plain[:, 0] - plain[:, 1], shifted[:, 0] - shifted[:, 1], atol=1e-3)


def test_no_difference_of_many_responses_exceeds_the_bound():
    rewards = torch.randn(64, 5)
    scaled = DifferenceScaler(1.0)(rewards)
    assert differences(scaled).abs().max() <= 1
    loose = DifferenceScaler(100.0)(rewards)
    torch.testing.assert_close(differences(loose), differences(rewards) / differences(rewards).square().mean().sqrt())


def test_differences_have_unit_deviation_and_are_bounded():
    rewards = torch.randn(4096, 2) * 7
    scaled = DifferenceScaler(1.5)(rewards)
    difference = scaled[:, 0] - scaled[:, 1]
    assert difference.abs().max() <= 1.5
    inside = difference.abs() < 1.5
    raw = (rewards[:, 0] - rewards[:, 1])[inside]
    torch.testing.assert_close(raw / difference[inside], torch.full_like(raw, 7 * 2**0.5), rtol=0.05, atol=0)


def test_statistics_run_over_calls_and_are_saved():
    scaler = DifferenceScaler(0.0)
    scaler(torch.tensor([[3.0, 0.0]]))
    restored = DifferenceScaler(0.0)
    restored.load_state_dict(scaler.state_dict())
    rewards = torch.tensor([[4.0, 0.0]])
    assert torch.equal(scaler(rewards), restored(rewards))
    assert scaler.std() == pytest.approx((25 / 2) ** 0.5)


def test_equal_rewards_stay_zero():
    assert torch.equal(DifferenceScaler(10.0)(torch.ones(3, 2)), torch.zeros(3, 2))
