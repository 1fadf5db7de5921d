"""Gradients from stale rollouts: the enumerated policy is right, and losses that are unbiased on paper are so here."""

import pytest
import torch
from torch import Tensor

from benchmarks.frontier.gradients import losses, measure
from benchmarks.frontier.gradients.losses import LOSSES, Batch
from benchmarks.frontier.gradients.measure import Task, gradients
from benchmarks.frontier.gradients.policy import exact_gradient, kl, values


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(measure, "V", 3)
    monkeypatch.setattr(measure, "L", 3)
    monkeypatch.setattr(measure, "F", 4)
    return Task(seed=0)


def batch(task: Task, head: Tensor, chosen: Tensor) -> Batch:
    responses = task.responses
    baseline = values(responses, task.sampler, task.rewards)[responses.prefixes]
    token_logprobs = responses.token_logprobs(head)[chosen]
    old = responses.token_logprobs(task.sampler)[chosen]
    expected = (responses.probabilities(head) * task.rewards).sum().item()
    return Batch(token_logprobs, old, responses.counted[chosen], task.rewards[chosen], baseline[chosen], expected)


def test_every_response_is_there_once(task):
    responses = task.responses
    rows = [tuple(row[counted].tolist()) for row, counted in zip(responses.tokens, responses.counted, strict=True)]
    assert len(set(rows)) == len(rows) == 1 + 2 + 4 * 3
    assert responses.probabilities(task.sampler).sum().item() == pytest.approx(1)
    probability = responses.probabilities(task.sampler)
    assert (probability * task.rewards).sum().item() == pytest.approx(0, abs=1e-12)
    assert (probability * task.rewards**2).sum().item() == pytest.approx(1)


def test_values_are_expected_rewards_after_a_prefix(task):
    responses, found = task.responses, values(task.responses, task.sampler, task.rewards)
    probability = responses.probabilities(task.sampler)
    for prefix in range(len(responses.features)):
        goes_through = ((responses.prefixes == prefix) & responses.counted).any(1)
        share = probability * goes_through
        assert found[prefix].item() == pytest.approx(((share * task.rewards).sum() / share.sum()).item())


def test_the_exact_gradient_is_that_of_finite_differences(task):
    gradient, step = exact_gradient(task.responses, task.sampler, task.rewards), 1e-5
    for place in ((0, 1), (4, 2)):
        ends = []
        for sign in (1, -1):
            head = task.sampler.clone()
            head[place] += sign * step
            ends.append((task.responses.probabilities(head) * task.rewards).sum())
        assert gradient[place].item() == pytest.approx(((ends[0] - ends[1]) / (2 * step)).item(), rel=1e-6)


def test_a_policy_moves_as_far_as_asked(task):
    assert kl(task.responses, task.policy(0.3), task.sampler) == pytest.approx(0.3)
    assert torch.equal(task.policy(0.0), task.sampler)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradients_of_groups_are_those_of_autograd(task, name):
    head = task.policy(0.4).requires_grad_()
    chosen = torch.randint(len(task.responses.tokens), (5, 4), generator=torch.Generator().manual_seed(1))
    given = batch(task, head, chosen)
    (weights,) = torch.autograd.grad(LOSSES[name](given), given.token_logprobs, retain_graph=True)
    probability = (task.responses.features @ head).softmax(-1).detach()
    found = gradients(task.responses, probability, chosen, weights.where(given.counted, 0.0))
    for group in range(5):
        alone = batch(task, head, chosen[group : group + 1])
        (expected,) = torch.autograd.grad(LOSSES[name](alone), head)
        torch.testing.assert_close(found[group], expected)


@pytest.mark.parametrize("name", ["none", "rloo_ratios", "exact_baseline"])
@pytest.mark.parametrize("nats", [0.0, 0.5])
def test_unclipped_ratios_make_the_mean_the_exact_gradient(task, monkeypatch, name, nats):
    """Over all pairs of responses, each with the probability of what sampled."""
    monkeypatch.setattr(losses, "RATIO_CAP", 1e9)
    count = len(task.responses.tokens)
    chosen = torch.cartesian_prod(torch.arange(count), torch.arange(count))
    probability = task.responses.probabilities(task.sampler)
    head = task.policy(nats)
    given = batch(task, head, chosen)
    token_logprobs = given.token_logprobs.requires_grad_()
    (weights,) = torch.autograd.grad(LOSSES[name](given), token_logprobs)
    policy = (task.responses.features @ head).softmax(-1)
    found = gradients(task.responses, policy, chosen, weights.where(given.counted, 0.0))
    mean = -(probability[chosen].prod(1)[:, None, None] * found).sum(0)
    exact = exact_gradient(task.responses, head, task.rewards)
    cosine = (mean * exact).sum() / (mean.norm() * exact.norm())
    assert cosine.item() == pytest.approx(1, abs=1e-9)


def test_measured_noise_is_the_deviation_of_groups(task, monkeypatch):
    monkeypatch.setattr(measure, "RESPONSES", 2**12)
    monkeypatch.setattr(measure, "CHUNK", 2**10)
    found = measure.measured(task, task.policy(0.2), 4, seed=3)
    assert found["none"]["cosine"] > 0.98
    chosen = torch.cat(list(measure.samples(task, 4, 3)))
    head = task.policy(0.2)
    given = batch(task, head, chosen)
    token_logprobs = given.token_logprobs.requires_grad_()
    (weights,) = torch.autograd.grad(LOSSES["none"](given), token_logprobs)
    policy = (task.responses.features @ head).softmax(-1)
    groups = -gradients(task.responses, policy, chosen, weights.where(given.counted, 0.0)).flatten(1)
    exact = exact_gradient(task.responses, head, task.rewards).flatten()
    signal = groups.mean(0) @ exact / exact.norm()
    assert found["none"]["noise"] == pytest.approx((groups.var(0).sum().sqrt() / signal).item(), rel=1e-9)
