from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fastp3o.models.packed_model import PackedModel
from fastp3o.objectives.base import Microbatch
from fastp3o.objectives.kl_coefficient import KLCoefficient
from fastp3o.objectives.ppo import PPO, PPOConfig, ppo_loss
from fastp3o.training.loop import train
from fastp3o_kernels.losses import step_kl
from tests.fastp3o.backward import means
from tests.fastp3o.runs import assert_equal, config, copy_at_save_before, metrics, weights


def run(model: str, folder: str, **changes) -> None:
    train(config(model, folder, PPOConfig, **changes))


def given(old_logprobs: Tensor, old_values: Tensor, advantages: Tensor, returns: Tensor) -> Microbatch:
    unused = torch.empty(0)
    prepared = {"old_values": old_values, "advantages": advantages, "returns": returns}
    return Microbatch(None, unused, old_logprobs, unused, unused, unused, prepared=prepared)


def settings(**changes) -> PPOConfig:
    return PPOConfig(model="", output_dir="", prompts="", reward="", **changes)


def test_the_first_step_is_the_policy_gradient():
    logprobs = torch.randn(9, dtype=torch.float64, requires_grad=True)
    values = torch.randn(9, dtype=torch.float64, requires_grad=True)
    advantages, returns = torch.randn(2, 9, dtype=torch.float64)
    loss, metrics = ppo_loss(
        logprobs,
        values,
        given(logprobs.detach(), values.detach(), advantages, returns),
        len(logprobs),
        settings(value_coef=0.5),
    )
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages / 9)
    torch.testing.assert_close(values.grad, 0.5 * (values.detach() - returns) / 9)
    metrics = means(metrics)
    assert metrics["ratio_mean"] == metrics["ratio_max"] == 1
    assert metrics["clip_fraction"] == metrics["value_clip_fraction"] == 0


def test_importance_weights_are_of_the_policys_loss_alone():
    logprobs = torch.randn(4, dtype=torch.float64, requires_grad=True)
    values = torch.randn(4, dtype=torch.float64, requires_grad=True)
    advantages, returns = torch.randn(2, 4, dtype=torch.float64)
    microbatch = given(logprobs.detach(), values.detach(), advantages, returns)
    ratios = torch.tensor([0.5, 1.0, 1.9, 1e300], dtype=torch.float64)
    weighted = replace(microbatch, sampler_token_logprobs=logprobs.detach() - ratios.log())
    loss, metrics = ppo_loss(logprobs, values, weighted, 4, settings(value_coef=0.5, sampler_ratio_cap=2.0))
    loss.backward()
    torch.testing.assert_close(logprobs.grad, -advantages * ratios.clamp(max=2) / 4)
    torch.testing.assert_close(values.grad, 0.5 * (values.detach() - returns) / 4)
    metrics = means(metrics)
    assert metrics["sampler_ratio_mean"].item() == pytest.approx((0.5 + 1 + 1.9 + 2) / 4)
    assert metrics["sampler_ratio_capped"] == 0.25


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "moves"), [(0.5, 1, False), (0.5, -1, True), (-0.5, 1, True), (-0.5, -1, False)]
)
def test_a_ratio_outside_the_range_is_only_drawn_back(log_ratio, advantage, moves):
    old, logprobs = torch.tensor([-1.0]), torch.tensor([-1.0 + log_ratio], requires_grad=True)
    zero = torch.zeros(1)
    loss, metrics = ppo_loss(
        logprobs,
        zero.clone().requires_grad_(),
        given(old, zero, torch.tensor([float(advantage)]), zero),
        len(logprobs),
        settings(),
    )
    loss.backward()
    assert bool(logprobs.grad.ne(0)) == moves
    assert means(metrics)["clip_fraction"] == 1


def test_the_penaltys_gradient_is_that_of_the_kl_from_the_old_policy():
    """Over all tokens of a vocabulary, each as often as the old policy samples it, as autograd has it of the KL."""
    torch.manual_seed(0)
    old = torch.randn(6, dtype=torch.float64).log_softmax(0)
    logits = torch.randn(6, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad((old.exp() * (old - logits.log_softmax(0))).sum(), logits)
    (got,) = torch.autograd.grad((old.exp() * step_kl(logits.log_softmax(0), old)).sum(), logits)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("bound", ["penalty", "both"])
def test_a_penalty_takes_the_place_of_clipping_or_joins_it(bound):
    """Written a second time, token by token."""
    torch.manual_seed(0)
    old, advantages = torch.randn(2, 8, dtype=torch.float64)
    logprobs = (old + 0.4 * torch.randn(8, dtype=torch.float64)).requires_grad_()
    zero = torch.zeros(8, dtype=torch.float64)
    loss, _ = ppo_loss(
        logprobs, zero, given(old, zero, advantages, zero), 8, settings(step_bound=bound, step_kl_coef=0.6)
    )
    expected = 0.0
    for now, before, a in zip(logprobs, old, advantages, strict=True):
        ratio = torch.exp(now) / torch.exp(before)
        gain = a * ratio
        if bound == "both":
            gain = torch.minimum(gain, a * ratio.clamp(0.8, 1.2))
        expected = expected - (gain - 0.6 * (ratio - 1 - torch.log(ratio))) / 8
    torch.testing.assert_close(loss, expected)
    theirs = torch.autograd.grad(expected, logprobs)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, logprobs)[0], theirs)


def test_the_penaltys_weight_follows_schulmans_rule():
    coefficient = KLCoefficient(1.0, target=0.01, foresight=0)
    values = []
    for kl in (0.016, 0.014, 0.007, 0.0066, 0.0, 0.02):
        coefficient.adapt(kl)
        values.append(coefficient.value)
    assert values == [2.0, 2.0, 2.0, 1.0, 0.5, 1.0]
    fixed = KLCoefficient(1.0, target=None, foresight=0)
    fixed.adapt(9.0)
    assert fixed.value == 1.0


def test_an_adapted_penalty_is_measured_after_the_update_and_resumed(workplace, tiny_model):
    penalised = {"step_bound": "penalty", "step_kl_target": 1e-4, "save_every": 2, "reward": "rewards_for_tests:varied"}
    run(tiny_model, "whole", **penalised)
    weight = 1.0
    for step in metrics("whole"):
        assert step["step_kl"] > 0
        assert step["step_kl_coef"] == weight
        weight *= 2 if step["step_kl"] > 1.5e-4 else 0.5 if step["step_kl"] < 1e-4 / 1.5 else 1
    assert weight != 1.0
    copy_at_save_before("whole", "resumed")
    run(tiny_model, "resumed", resume=True, **penalised)
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))


def test_a_heavier_penalty_keeps_an_update_smaller(workplace, tiny_model):
    """A target that is never reached leaves the weight as it is given for a first update, and has it measured."""
    moved = []
    for coef in (0.01, 100.0):
        bound = {"step_bound": "penalty", "step_kl_coef": coef, "step_kl_target": 1e9}
        run(tiny_model, f"run-{coef}", updates=1, reward="rewards_for_tests:varied", **bound)
        moved.append(metrics(f"run-{coef}")[0]["step_kl"])
    assert moved[1] < moved[0] / 2


@pytest.mark.parametrize(("value", "moves"), [(0.1, True), (0.3, False), (-0.3, True)])
def test_a_value_that_has_moved_far_towards_its_return_stays(value, moves):
    """Its clipped distance to the return, 1, is the longer one then."""
    values = torch.tensor([value], requires_grad=True)
    zero = torch.zeros(1)
    loss, _ = ppo_loss(zero.clone().requires_grad_(), values, given(zero, zero, zero, torch.ones(1)), 1, settings())
    loss.backward()
    assert bool(values.grad.ne(0)) == moves


def test_a_run_raises_the_reward_and_saves_the_policy_alone(workplace, tiny_model):
    evaluated = {"eval_prompts": "prompts.jsonl", "eval_at": "1,5", "gold_reward": "rewards_for_tests:shifted"}
    run(tiny_model, "run", updates=20, **evaluated)
    steps = metrics("run")
    assert sum(s["reward"] for s in steps[-5:]) > sum(s["reward"] for s in steps[:5])
    assert steps[0]["value_loss"] > 0
    evaluations = metrics("run", "eval.jsonl")
    assert [evaluation["step"] for evaluation in evaluations] == [0, 1, 5, 20]
    # Prompts are "Say tree:" or a letter longer, and each is shifted by eight times its length.
    offset = 8 * (9 + 7 * 10) / 8
    for evaluation in evaluations:
        assert evaluation["gold"] == pytest.approx(evaluation["reward"] + offset)
    _, loading = AutoModelForCausalLM.from_pretrained("run/model", output_loading_info=True)
    assert not loading["unexpected_keys"]
    assert not loading["missing_keys"]


def test_the_first_ratio_is_exactly_one(workplace, tiny_model):
    run(tiny_model, "run", updates=1, inner_epochs=1, prompts_per_minibatch=8)
    (step,) = metrics("run")
    assert step["ratio_mean"] == step["ratio_max"] == 1


def test_values_are_learned_beside_the_policy_and_not_by_it(workplace, tiny_model):
    """Within the first update advantages are the same, whatever the critic learns meanwhile."""
    run(tiny_model, "without", updates=1, value_coef=0.0)
    run(tiny_model, "with", updates=1, value_coef=100.0, critic_learning_rate=1e-2)
    assert_equal(weights("without"), weights("with"))
    run(tiny_model, "longer", updates=8, value_coef=1.0, critic_learning_rate=1e-2, reward="rewards_for_tests:constant")
    losses = [step["value_loss"] for step in metrics("longer")]
    assert losses[-1] < 0.1 * losses[0]


def test_an_untied_head_is_no_part_of_the_critic(tiny_model, workplace):
    untied = AutoConfig.from_pretrained(tiny_model, tie_word_embeddings=False)
    policy = PackedModel(AutoModelForCausalLM.from_config(untied))
    PPO(settings()).add_to(policy)
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    assert frozen == {"critic.body.model.lm_head.weight"}


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_resumed_run_is_the_uninterrupted_one(workplace, tiny_model, precision):
    """The critic is part of the state."""
    run(tiny_model, "whole", precision=precision, save_every=2)
    copy_at_save_before("whole", "resumed")
    run(tiny_model, "resumed", resume=True, precision=precision)
    assert metrics("whole") == metrics("resumed")
    assert_equal(weights("whole"), weights("resumed"))


def test_microbatches_do_not_matter(workplace, tiny_model):
    run(tiny_model, "one", prompts_per_minibatch=8, updates=2)
    run(tiny_model, "eight", prompts_per_minibatch=8, updates=2, tokens_per_row=1)
    first, second = weights("one"), weights("eight")
    assert all(torch.allclose(first[name], second[name], atol=2e-4) for name in first)


def test_adapters_train_with_a_critic(workplace, tiny_model):
    run(tiny_model, "run", updates=2, lora_rank=4, learning_rate=1e-2)
    assert metrics("run")[1]["kl"] != 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gae_lambda": 1.5}, "--gae_lambda must be within 0 and 1"),
        ({"value_clip_range": 0}, "--value_clip_range must be above 0"),
        ({"critic_learning_rate": 0}, "--critic_learning_rate must be above 0"),
        ({"clip_range": -1}, "--clip_range must be above 0"),
        ({"step_kl_coef": 2.0}, "--step_kl_coef does nothing without --step_bound penalty or --step_bound both"),
        ({"step_kl_target": 0.1}, "--step_kl_target does nothing without --step_bound penalty"),
        (
            {"step_bound": "penalty", "clip_range": 0.1},
            "--clip_range does nothing without --step_bound clip or --step_bound both",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        settings(**changes)
