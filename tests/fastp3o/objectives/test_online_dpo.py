import pytest
import torch
import torch.nn.functional as F

from fastp3o.objectives.online_dpo import OnlineDPOConfig, dpo_loss
from fastp3o.stages.online import train
from tests.fastp3o.runs import assert_equal, config, metrics, weights


def run(model: str, folder: str, **changes) -> None:
    train(config(model, folder, OnlineDPOConfig, **changes))


def test_the_loss_is_that_of_the_chosen_over_the_rejected():
    log_ratios = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    rewards = torch.randn(6, 2)
    loss, metrics = dpo_loss(log_ratios, rewards, kl_coef=0.3)
    chosen = rewards.argmax(dim=1, keepdim=True)
    margins = (log_ratios.gather(1, chosen) - log_ratios.gather(1, 1 - chosen)).squeeze(1)
    expected = F.softplus(-0.3 * margins).mean()
    torch.testing.assert_close(loss, expected)
    assert metrics["accuracy"] == (margins > 0).float().mean()
    (gradient,), (wanted,) = (torch.autograd.grad(x, log_ratios) for x in (loss, expected))
    torch.testing.assert_close(gradient, wanted)


def test_more_responses_give_all_their_pairs():
    log_ratios, rewards = torch.randn(3, 4), torch.randn(3, 4)
    loss, _ = dpo_loss(log_ratios, rewards, kl_coef=0.1)
    pairs = [(i, j) for i in range(4) for j in range(4) if i < j]
    each = [dpo_loss(log_ratios[:, pair], rewards[:, pair], kl_coef=0.1)[0] for pair in map(list, pairs)]
    torch.testing.assert_close(loss, torch.stack(each).mean())


def test_equal_rewards_choose_nothing():
    log_ratios = torch.randn(2, 2, requires_grad=True)
    loss, metrics = dpo_loss(log_ratios, torch.tensor([[1.0, 1.0], [0.0, 2.0]]), kl_coef=0.1)
    loss.backward()
    assert metrics["tied"] == 0.5
    assert log_ratios.grad[0].tolist() == [0, 0]
    assert log_ratios.grad[1].ne(0).all()


def test_a_run_raises_the_reward(workplace, tiny_model):
    run(tiny_model, "run", updates=20, kl_coef=0.1)
    steps = metrics("run")
    assert steps[0]["margin"] != 0
    assert sum(s["reward"] for s in steps[-5:]) > sum(s["reward"] for s in steps[:5])


def test_a_resumed_run_is_the_uninterrupted_one(workplace, tiny_model):
    run(tiny_model, "whole")
    run(tiny_model, "resumed", updates=2, save_every=1)
    run(tiny_model, "resumed", resume=True, save_every=1)
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))


def test_beta_must_be_above_zero(workplace, tiny_model):
    with pytest.raises(ValueError, match="--kl_coef must be above 0"):
        run(tiny_model, "run", kl_coef=0.0)
