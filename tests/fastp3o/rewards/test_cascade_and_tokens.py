"""Rewards that pass responses on to the next one, and rewards of single tokens, up to PPO's
advantages.
"""

from math import nan

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from fastp3o import UserError, train
from fastp3o.calls.function import FunctionError
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.remote import read_rewards
from fastp3o.rewards.reward import (
    TOKEN_REWARDS,
    WeightedSum,
    logged_means,
    penalized_rewards,
    rewarded,
)
from fastp3o.rollouts.groups import Group, Prompt, Response, Turn
from tests.fastp3o.counted import instructions
from tests.fastp3o.runs import config, metrics


def test_each_reward_answers_for_what_those_before_it_have_passed_on(rollouts):
    asked = []

    def rule(prompts, responses, log_metric):
        asked.append(responses)
        log_metric("seen", len(responses))
        return [1.0 if "a" in response else None for response in responses]

    def judge(prompts, responses):
        asked.append(responses)
        return [0.5] * len(responses)

    cascade = Cascade(
        {f.__name__: FunctionReward(f"tests:{f.__name__}", None, f) for f in (rule, judge)}
    )
    cascade.rewards["rule"].passes = True
    values = rewarded({"reward": cascade}, rollouts)
    assert values["reward"].tolist() == [[1.0, 0.5], [0.5, 0.5]]
    assert asked == [[" aei", " xyz", " o", " u"], [" xyz", " o", " u"]]
    assert values["reward/rule_answered"].tolist() == [[1, 0], [0, 0]]
    assert values["reward/judge_answered"].tolist() == [[0, 1], [1, 1]]
    assert logged_means({"reward": cascade}) == {"reward/seen": 4.0}
    # What the first has answered nobody else is asked for.
    cascade.rewards["rule"].function = lambda prompts, responses, log_metric: [2.0] * 4
    assert rewarded({"reward": cascade}, rollouts)["reward"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    # It fails as its rewards do.
    cascade.rewards["rule"].function = lambda prompts, responses, log_metric: 1 / 0
    with pytest.raises(FunctionError, match="tests:rule"):
        cascade(rollouts)
    assert len(asked) == 2


def test_an_environment_and_an_endpoint_pass_on_what_they_have_no_reward_for():
    turns = [(Turn(0, 1, {"found": 2.0}),), (Turn(0, 1),)]
    group = Group(Prompt("", [1]), [Response([5], "", True, None, one) for one in turns])
    environment = EnvironmentReward({"found": 0.5}, passes=True)
    judge = FunctionReward("tests:judge", None, lambda prompts, responses: [7.0] * len(responses))
    assert Cascade({"environment": environment, "judge": judge})([group]).tolist() == [[1.0, 7.0]]
    assert EnvironmentReward({"found": 0.5})([group]).tolist() == [[1.0, 0.0]]
    passed, number = read_rewards(b'{"rewards": [null, 1]}', 2, passes=True)
    assert passed != passed
    assert number == 1
    with pytest.raises(ValueError, match="whose reward 0 is not a finite number"):
        read_rewards(b'{"rewards": [null, 1]}', 2)


def test_rewards_of_tokens_lie_where_they_come_and_add_up_to_the_reward():
    def own_ids(prompts, responses, completion_ids):
        return [[0.25] * len(ids) for ids in completion_ids]

    first = Response(
        [5, 6, 7, 8, 9], "", True, None, (Turn(0, 2, {"a": 1.0}), Turn(4, 5, {"a": 2.0, "b": 1.0}))
    )
    second = Response([5, 6, 7], "", False, None, (Turn(1, 3, {"b": 4.0}),))
    groups = [Group(Prompt("", [1]), [first, second])]
    environment, tokens = (
        EnvironmentReward({"a": 1.0, "b": 0.5}),
        FunctionReward("tests:own_ids", None, own_ids),
    )
    both = WeightedSum({"environment": environment, "tokens": tokens}, [1.0, 2.0])
    values = penalized_rewards(
        both, groups, PenaltyConfig(missing_eos_penalty=3.0), 4, by_token=True
    )
    # Numbers at observed tokens, the third and fourth of the first response, count at the own token
    # before them.
    expected = [[0.5, 0.5 + 1.0 + 1.0, 0.5 + 2.5, 0.0], [0.5 + 0.5, 0.5 + 2.0, 0.0, 0.0]]
    assert values[TOKEN_REWARDS].tolist() == [expected]
    assert values["reward"].tolist() == [[sum(expected[0]), sum(expected[1]) - 3.0]]
    # What is only logged may be no number.
    unknown = FunctionReward(
        "tests:unknown", None, lambda *_, completion_ids: [[nan] * len(i) for i in completion_ids]
    )
    logged = WeightedSum(
        {"environment": environment, "tokens": tokens, "unknown": unknown}, [1.0, 2.0, 0.0]
    )
    values = penalized_rewards(logged, groups, PenaltyConfig(), 4, by_token=True)
    assert values[TOKEN_REWARDS].tolist() == [expected]


turns = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(-9, 9)), max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(turns, min_size=1, max_size=4), st.floats(-2, 2))
def test_rewards_of_tokens_add_up_one_by_one(trajectories, weight):
    """As a loop over tokens adds them up. Turns and observations may be empty."""
    responses, answers, expected = [], [], torch.zeros(1, len(trajectories), 40)
    for k, parts in enumerate(trajectories):
        length, own, of_turns, values = 0, 0, [], []
        for observed, written, value in parts:
            values += [value / (1 + i) for i in range(observed + written)]
            of_turns.append(Turn(length + observed, length + observed + written, {"a": value}))
            length += observed + written
        values.append(0.5)
        # an observation at the end; everything is the policy's where there are no turns
        length += 1
        for token, value in enumerate(values):
            own += any(turn.start <= token < turn.end for turn in of_turns) if of_turns else 1
            expected[0, k, max(own - 1, 0)] += weight * value
        own = 0
        for turn in of_turns:
            own += turn.end - turn.start
            expected[0, k, max(own - 1, 0)] += 0.5 * turn.rewards["a"]
        responses.append(Response([7] * length, "", True, None, tuple(of_turns)))
        answers.append(values)
    groups = [Group(Prompt("", [1]), responses)]
    function = FunctionReward("tests:f", None, lambda *_, completion_ids: answers)
    rewards = {"function": function, "environment": EnvironmentReward({"a": 1.0})}
    values = penalized_rewards(
        WeightedSum(rewards, [weight, 0.5]), groups, PenaltyConfig(), 40, by_token=True
    )
    assert torch.equal(values[TOKEN_REWARDS], expected)


@pytest.mark.parametrize("turns", [0, 5])
def test_python_looks_at_turns_and_arrays_at_their_tokens(turns):
    def work(length):
        of_turns = tuple(Turn(i * length, (i + 1) * length - 2, {"a": 1.0}) for i in range(turns))
        responses = [Response([7] * (5 * length), "", True, None, of_turns)] * 4
        ones = [1.0] * (5 * length)
        function = FunctionReward("tests:ones", None, lambda *_, completion_ids: [ones] * 4)
        rewards = WeightedSum(
            {"function": function, "environment": EnvironmentReward({"a": 1.0})}, [1.0, 1.0]
        )
        arguments = rewards, [Group(Prompt("", [1]), responses)], PenaltyConfig(), 5 * length
        return instructions(lambda: penalized_rewards(*arguments, by_token=True))

    work(10)  # whatever a first call sets up
    assert work(1000) <= 1.02 * work(10)


def test_four_times_the_turns_are_four_times_the_work():
    def work(count):
        of_turns = tuple(Turn(9 * i, 9 * i + 5, {"a": 1.0}) for i in range(count))
        groups = [Group(Prompt("", [1]), [Response([7] * 9 * count, "", True, None, of_turns)] * 4)]
        reward, penalties = EnvironmentReward({"a": 1.0}), PenaltyConfig()
        return instructions(
            lambda: penalized_rewards(reward, groups, penalties, 9 * count, by_token=True)
        )

    assert work(64) <= 4.2 * work(16)


def run(tiny_model, folder, reward, **changes):
    train(config(tiny_model, folder, PPOConfig, reward="", updates=2, **changes), reward=reward)
    return metrics(folder)


def silent(prompts, responses):
    return [None] * len(responses)


def test_ppo_sees_rewards_at_their_tokens(workplace, tiny_model):
    def late(prompts, responses, completion_ids):
        return [[0.0] * (len(ids) - 1) + [float(len(set(ids)))] for ids in completion_ids]

    def early(prompts, responses, completion_ids):
        return [values[::-1] for values in late(prompts, responses, completion_ids)]

    runs = {"late": (late, True), "off": (early, False), "early": (early, True)}
    at_the_end, off, at_the_start = (
        run(tiny_model, folder, reward, process_rewards=sees)[0]
        for folder, (reward, sees) in runs.items()
    )
    assert off["value_loss"] == pytest.approx(at_the_end["value_loss"], rel=1e-5)
    assert at_the_start["reward"] == at_the_end["reward"]
    assert abs(at_the_start["value_loss"] - at_the_end["value_loss"]) > 0.01


def test_a_reward_that_always_answers_is_the_last(workplace, tiny_model, tokenizer):
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained(
        "judge"
    )
    tokenizer.save_pretrained("judge")
    with pytest.raises(
        UserError, match="answers for every response: `else` after it has no effect"
    ):
        run(tiny_model, "run", [["judge", silent]])
    line, _ = run(tiny_model, "cascade", [[silent, "judge"]])
    assert (line["reward/silent_answered"], line["reward/judge_answered"]) == (0.0, 1.0)
    assert torch.tensor(line["reward"]).isfinite()
