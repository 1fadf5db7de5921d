import pytest
import torch

from fastp3o.models.loading import load_reward_model
from fastp3o.rewards.reward import ModelReward, load_reward, rewards_of
from fastp3o.rollouts.transformers_sampler import Rollouts

CPU = torch.device("cpu")


@pytest.fixture
def rollouts(tokenizer) -> Rollouts:
    prompts, responses = ["Say a:", "Say a:", "Say b:"], [" aei", " xyz", " o"]
    ends = [[tokenizer.eos_token_id], [], [tokenizer.eos_token_id]]
    return Rollouts(
        prompt_ids=[tokenizer(prompt).input_ids for prompt in prompts],
        response_ids=[tokenizer(text).input_ids + end for text, end in zip(responses, ends, strict=True)],
        prompts=prompts,
        responses=responses,
        finished=[True, False, True],
    )


def load(name, tokenizer):
    return load_reward(name, tokenizer, device=CPU, dtype=torch.float32)


def test_a_function_sees_texts_and_a_missing_end_costs_the_penalty(workplace, tokenizer, rollouts):
    values = rewards_of(load("rewards_for_tests:vowels", tokenizer), rollouts, missing_eos_penalty=0.5)
    assert values.tolist() == [0.75, -0.5, 0.25]


def test_a_function_must_reward_every_response(workplace, tokenizer, rollouts):
    with pytest.raises(ValueError, match="one_too_few returned 2 rewards for 3 responses"):
        load("rewards_for_tests:one_too_few", tokenizer)(rollouts)


@pytest.mark.parametrize("name", ["no_such_module:f", "rewards_for_tests:no_such_function"])
def test_a_function_that_is_not_there_is_named(workplace, tokenizer, name):
    with pytest.raises(ValueError, match=name):
        load(name, tokenizer)


def test_texts_are_translated_for_another_vocabulary(tiny_model, tokenizer, rollouts):
    model = load_reward_model(tiny_model)
    torch.nn.init.normal_(model.model.score.weight)
    same = ModelReward(model, tokenizer, tokenizer)
    other = ModelReward(model, tokenizer, tokenizer)
    other.shares_vocabulary = False
    assert other.translate(rollouts) == (rollouts.prompt_ids, rollouts.response_ids)
    assert same(rollouts) == other(rollouts)
