"""Rewards that pass responses on to the next one, and rewards of single tokens, up to PPO's advantages."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from fastp3o import UserError, train
from fastp3o.named_function import FunctionError
from fastp3o.objectives.config.ppo import PPOConfig
from fastp3o.rewards.cascade import Cascade
from fastp3o.rewards.config import PenaltyConfig
from fastp3o.rewards.environment import EnvironmentReward
from fastp3o.rewards.function import FunctionReward
from fastp3o.rewards.remote import read_rewards
from fastp3o.rewards.reward import TOKEN_REWARDS, WeightedSum, logged_means, penalised_rewards, rewarded
from fastp3o.rollouts.groups import Group, Prompt, Response, Turn
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

    cascade = Cascade({f.__name__: FunctionReward(f"tests:{f.__name__}", None, f) for f in (rule, judge)})
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

    first = Response([5, 6, 7, 8, 9], "", True, None, (Turn(0, 2, {"a": 1.0}), Turn(4, 5, {"a": 2.0, "b": 1.0})))
    second = Response([5, 6, 7], "", False, None, (Turn(1, 3, {"b": 4.0}),))
    groups = [Group(Prompt("", [1]), [first, second])]
    environment, tokens = EnvironmentReward({"a": 1.0, "b": 0.5}), FunctionReward("tests:own_ids", None, own_ids)
    both = WeightedSum({"environment": environment, "tokens": tokens}, [1.0, 2.0])
    values = penalised_rewards(both, groups, PenaltyConfig(missing_eos_penalty=3.0), 4, by_token=True)
    # Numbers at observed tokens, the third and fourth of the first response, count at the own token before them.
    expected = [[0.5, 0.5 + 1.0 + 1.0, 0.5 + 2.5, 0.0], [0.5 + 0.5, 0.5 + 2.0, 0.0, 0.0]]
    assert values[TOKEN_REWARDS].tolist() == [expected]
    assert values["reward"].tolist() == [[sum(expected[0]), sum(expected[1]) - 3.0]]


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
        run(tiny_model, folder, reward, process_rewards=sees)[0] for folder, (reward, sees) in runs.items()
    )
    assert off["value_loss"] == pytest.approx(at_the_end["value_loss"], rel=1e-5)
    assert at_the_start["reward"] == at_the_end["reward"]
    assert abs(at_the_start["value_loss"] - at_the_end["value_loss"]) > 0.01


def test_a_reward_that_always_answers_is_the_last(workplace, tiny_model, tokenizer):
    AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1).save_pretrained("judge")
    tokenizer.save_pretrained("judge")
    with pytest.raises(UserError, match="answers for every response: `else` after it does nothing"):
        run(tiny_model, "run", [["judge", silent]])
    line, _ = run(tiny_model, "cascade", [[silent, "judge"]])
    assert (line["reward/silent_answered"], line["reward/judge_answered"]) == (0.0, 1.0)
    assert torch.tensor(line["reward"]).isfinite()
