"""The search for the learning rate, on a policy whose KL is known: (way / needed way)² times the
target.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastp3o.training import kl_per_update, loop, online
from fastp3o.training.kl_per_update import FINDING, RISE, LearningRateSearch, Search
from tests.fastp3o.runs import config, metrics

TARGET, START, NEEDED = 0.3, 1e-6, 1e-4
VARIED = {"reward": "rewards_for_tests:varied"}


class Policy:
    """Updates of so many steps. noise: what rounding adds to log-ratios, in nats per response;
    measured in the updates that a run measures it in.
    """

    def __init__(self, steps: int, noise: float = 0.0, start: float = START):
        self.steps, self.noise, self.search, self.update = steps, noise, Search(start), 0
        self.said: list[str] = []
        self.accelerator = SimpleNamespace(
            autocast=nullcontext, print=self.said.append, num_processes=1
        )
        self.schedule = SimpleNamespace(base_lrs=[start])
        self.model = None

    @property
    def rate(self) -> float:
        return self.schedule.base_lrs[0]

    def next_learning_rate(self) -> float:
        return self.rate

    def set_peak_learning_rate(self, rate: float) -> None:
        self.schedule.base_lrs[0] = rate

    def train(self, *norms: float, needed: float = NEEDED) -> list[float]:
        """One update for each norm of its steps' gradients. Returns what each has moved."""
        return [self.one_update(norm, needed) for norm in norms]

    def one_update(self, norm: float, needed: float) -> float:
        rates = []

        def kl() -> float:
            return TARGET * (norm * sum(rates) / (self.steps * needed)) ** 2

        self.update += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kl_per_update, "kl_moved", lambda *_: kl() + self.noise**2 / 2)
            search = LearningRateSearch(
                self, TARGET, self.search, self.update, [[None]], self.steps, "policy"
            )
            for number in range(self.steps):
                search.before_step()
                if number == 0 and self.update % 10 == 1:
                    self.search.note_noise(
                        self.accelerator, {"ratio/noise": torch.tensor(self.noise)}
                    )
                rates.append(self.rate)
                if search.after_step({"grad_norm": torch.tensor(norm)}):
                    break
        return kl()


@settings(max_examples=30, deadline=None)
@given(
    ties=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    steps=st.sampled_from([1, 4, 64]),
    start=st.sampled_from([1e-6, 1e-5]),
)
def test_updates_without_a_gradient_are_no_lessons(ties, steps, start):
    """The rate is found with the first update that has one, and is free to change in ten of those."""
    policy, found = Policy(steps, start=start), NEEDED
    for number, tied in enumerate(ties):
        policy.train(*[0.0] * tied)
        assert policy.search.lessons == number
        assert policy.rate == pytest.approx(found if number else start)
        policy.train(1.0)
        assert policy.rate == pytest.approx(found)
    policy.train(*[1.0] * (FINDING - len(ties)), needed=4 * NEEDED)
    assert policy.rate == pytest.approx(4 * NEEDED)
    policy.train(0.0, 1.0, needed=8 * NEEDED)
    assert policy.rate == pytest.approx(RISE * 4 * NEEDED)


@settings(max_examples=30, deadline=None)
@given(noise=st.floats(0.0, 0.2), steps=st.sampled_from([8, 16, 64]))
def test_two_updates_find_the_rate_whatever_rounding_adds(noise, steps):
    """The first has moved less than rounding does: it was taken for movement, and the rate rose for
    five updates.
    """
    policy = Policy(steps, noise)
    moved = policy.train(1.0, 1.0)
    assert moved[0] < 1e-3
    assert policy.rate == pytest.approx(NEEDED, rel=0.1)
    moved += policy.train(*[1.0] * 20)
    # The last step of a test adds to its way as much as all before it, and one step at the rate
    # that it began with.
    assert max(moved) < (2 + 1 / steps) ** 2 * TARGET
    assert moved[-1] == pytest.approx(TARGET, rel=0.2)


@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("noise", [0.1, 0.3, 1.5])
def test_few_steps_an_update_find_it_too_and_rounding_beyond_the_target_is_no_end_of_it(
    steps, noise
):
    policy = Policy(steps, noise)
    moved = policy.train(*[1.0] * 10)
    assert max(moved) < 4 * TARGET + noise**2
    assert policy.rate > NEEDED / 10 if noise < 1 else policy.rate >= START
    if noise < 1:
        assert moved[-1] == pytest.approx(TARGET, rel=0.5)


def test_in_fp32_rounding_changes_no_bit():
    exact, rounded = Policy(4), Policy(4, 1e-6)
    for policy in (exact, rounded):
        policy.search.ratio_noise = policy.noise
        policy.noise = 0.0
        policy.train(*[1.0, 0.0] * 7)
    assert exact.rate == rounded.rate


def test_a_rate_that_can_rise_no_faster_is_told_once():
    policy = Policy(4)
    policy.train(*[1.0] * FINDING)
    assert not policy.said
    policy.train(1.0, 0.0, 1.0, 1.0, needed=100 * NEEDED)
    (line,) = policy.said
    assert line.startswith(
        "--kl_per_update: an update moves 3e-05 of 0.3 nats, and the rate, 0.00011, rises by 10%"
    )


def test_the_search_is_a_part_of_the_state_and_begins_anew_at_another_rate():
    policy = Policy(4, 0.1)
    policy.train(1.0)
    assert policy.search.hidden
    saved = policy.search.state_dict()
    resumed = Search(START)
    resumed.load_state_dict(saved)
    assert (
        resumed.state_dict()
        == saved
        == {"given": START, "lessons": 1, "hidden": True, "ratio_noise": pytest.approx(0.1)}
    )
    other = Search(2 * START)
    other.load_state_dict(saved)
    assert (other.lessons, other.hidden, other.ratio_noise) == (0, False, saved["ratio_noise"])


def test_log_probs_with_a_noise_of_a_tenth_find_the_rate_of_those_without(
    workplace, tiny_model, monkeypatch
):
    """Log-probs of a tiny model with noise where bf16 has it: what an update moves, and another
    row.
    """

    def rounded(values: torch.Tensor, scale: float) -> torch.Tensor:
        return values + scale * torch.randn(values.shape, generator=generator)

    generator, policy_logprobs, again = (
        torch.Generator().manual_seed(0),
        kl_per_update.policy_logprobs,
        online.evaluated_again,
    )
    changes = {
        "learning_rate": 0.0,
        "updates": 4,
        "prompts_per_update": 8,
        "prompts_per_minibatch": 1,
        "inner_epochs": 4,
    }
    train = loop.train
    train(config(tiny_model, "exact", **changes, **VARIED))
    length = metrics("exact")[0]["response_length"]
    monkeypatch.setattr(
        kl_per_update,
        "policy_logprobs",
        lambda *given: [rounded(one, 0.1 / length**0.5) for one in policy_logprobs(*given)],
    )
    monkeypatch.setattr(online, "evaluated_again", lambda *given: rounded(again(*given), 0.1))
    train(config(tiny_model, "rounded", **changes, **VARIED))
    exact, found = metrics("exact"), metrics("rounded")
    assert found[0]["kl_moved"] > 100 * exact[0]["kl_moved"]
    assert found[2]["learning_rate"] == pytest.approx(exact[2]["learning_rate"], rel=0.6)
