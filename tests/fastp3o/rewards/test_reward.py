import pytest
import torch

from fastp3o.models.loading import load_reward_model
from fastp3o.packing.pack import Packing
from fastp3o.rewards.reward import load_reward, penalize_missing_eos
from fastp3o.rewards.reward_model import ModelReward
from fastp3o.rollouts.rollouts import Rollouts

SETTINGS = {"device": torch.device("cpu"), "packing": Packing(64)}


@pytest.fixture
def rollouts(tokenizer) -> Rollouts:
    prompts, responses = ["Say a:", "Say b:"], [[" aei", " xyz"], [" o", " u"]]
    finished = [[True, False], [True, True]]
    return Rollouts(
        prompts=prompts,
        prompt_ids=[tokenizer(prompt).input_ids for prompt in prompts],
        responses=responses,
        response_ids=[
            [
                tokenizer(text).input_ids + [tokenizer.eos_token_id] * finished
                for text, finished in zip(*group, strict=True)
            ]
            for group in zip(responses, finished, strict=True)
        ],
        finished=finished,
    )


def load(name, tokenizer):
    return load_reward(name, tokenizer, dtype=torch.float32, **SETTINGS)


def test_a_function_sees_texts_and_a_missing_end_costs_the_penalty(workplace, tokenizer, rollouts):
    rewards = load("rewards_for_tests:vowels", tokenizer)(rollouts)
    assert penalize_missing_eos(rewards, rollouts, 0.5).tolist() == [[0.75, -0.5], [0.25, 0.25]]


def test_a_function_must_reward_every_response(workplace, tokenizer, rollouts):
    with pytest.raises(ValueError, match="one_too_few returned 3 rewards for 4 responses"):
        load("rewards_for_tests:one_too_few", tokenizer)(rollouts)


@pytest.mark.parametrize("name", ["no_such_module:f", "rewards_for_tests:no_such_function"])
def test_a_function_that_is_not_there_is_named(workplace, tokenizer, name):
    with pytest.raises(ValueError, match=name):
        load(name, tokenizer)


def test_texts_are_translated_for_another_vocabulary(tiny_model, tokenizer, rollouts):
    model = load_reward_model(tiny_model, new_head=True)
    torch.nn.init.normal_(model.model.score.weight)
    same = ModelReward(model, tokenizer, tokenizer, **SETTINGS)
    other = ModelReward(model, tokenizer, tokenizer, **SETTINGS)
    other.shares_vocabulary = False
    assert other.translate(rollouts) == (rollouts.prompt_ids, rollouts.response_ids)
    assert same(rollouts).shape == (2, 2)
    assert torch.equal(same(rollouts), other(rollouts))
