import pytest
import torch

from fastp3o.rewards.scaling import AbsoluteScaler, DifferenceScaler, differences


def on_grid(*shape):
    return torch.randint(-64, 64, shape) / 16


@pytest.mark.parametrize(("scale", "K"), [(True, 2), (True, 4), (False, 3)])
def test_a_shift_per_prompt_changes_differences_in_no_bit_and_absolute_rewards_in_value(scale, K):
    plain, shifted = DifferenceScaler(2.0, scale=scale), DifferenceScaler(2.0, scale=scale)
    for _ in range(3):
        rewards = on_grid(8, K)
        assert torch.equal(plain(rewards), shifted(rewards + 1024 * on_grid(8, 1)))
    absolute, moved = AbsoluteScaler(10.0)(rewards), AbsoluteScaler(10.0)(rewards + 16 * on_grid(8, 1))
    assert not torch.allclose(differences(absolute), differences(moved), atol=1e-3)


def test_no_difference_of_many_responses_exceeds_the_bound():
    rewards = torch.randn(64, 5)
    scaled = DifferenceScaler(1.0)(rewards)
    assert differences(scaled).abs().max() <= 1
    loose = DifferenceScaler(100.0)(rewards)
    torch.testing.assert_close(differences(loose), differences(rewards) / differences(rewards).square().mean().sqrt())


def test_statistics_run_over_calls_and_are_saved():
    scaler = DifferenceScaler(0.0)
    assert torch.equal(scaler(torch.ones(1, 2)), torch.zeros(1, 2))
    scaler(torch.tensor([[3.0, 0.0]]))
    restored = DifferenceScaler(0.0)
    restored.load_state_dict(scaler.state_dict())
    rewards = torch.tensor([[4.0, 0.0]])
    assert torch.equal(scaler(rewards), restored(rewards))
    assert scaler.deviation_around(0.0) == pytest.approx((25 / 3) ** 0.5)
