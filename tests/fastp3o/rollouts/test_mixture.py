"""A mixture of two policies: of all its weight on one, it is that one; and tokens come with the mixture's log-probs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.cache import Room
from fastp3o.rollouts.engine import layer_shapes
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, Prompt
from fastp3o.rollouts.mixture import MixtureEngine, MixtureSampler, partly_from_mixture
from fastp3o_kernels.decoding import response_keys
from tests.fastp3o.groups import response_ids

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
GIVEN = [Prompt("", ids, number) for number, ids in enumerate(PROMPTS)]
LIMITS = {"max_response_tokens": 7, "batch_size": 2}


@pytest.fixture(scope="module")
def policies(tiny_model: str) -> list[PackedModel]:
    models = [AutoModelForCausalLM.from_pretrained(tiny_model) for _ in range(2)]
    torch.manual_seed(1)
    for parameter in models[1].parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return [PackedModel(model).eval() for model in models]


@pytest.mark.parametrize("weight", [0, 1])
def test_at_its_ends_the_mixture_is_one_of_the_two(policies, tiny_model, weight):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    mixture = MixtureSampler(policies[0], tokenizer, policies[1], weight, **LIMITS)
    mixed = response_ids(mixture(GIVEN, 3, 5))
    assert mixed == response_ids(EngineSampler(policies[weight], tokenizer, **LIMITS)(GIVEN, 3, 5))
    assert mixed != response_ids(EngineSampler(policies[1 - weight], tokenizer, **LIMITS)(GIVEN, 3, 5))


@torch.no_grad()
def test_tokens_come_with_the_log_probabilities_of_the_mixture(policies, tiny_model):
    shapes = [layer_shapes(policy, 3) for policy in policies]
    room = Room(prompts=3, prompt_tokens=4, responses_per_prompt=2, slots=4, response_tokens=7)
    engine = MixtureEngine(policies[1], shapes[1], 0.3, policies[0], shapes[0], room, end_ids=set())
    responses = engine.run(PROMPTS, response_keys(5, torch.arange(3), 2))
    for prompt, group, group_logprobs in zip(PROMPTS, *responses, strict=True):
        for ids, logprobs in zip(group, group_logprobs, strict=True):
            row = torch.tensor([prompt + ids])
            logits = []
            for policy in policies:
                with policy.with_own_attention() as model:
                    logits.append(model(row).logits[0, len(prompt) - 1 : -1])
            expected = (0.7 * logits[0].log_softmax(-1) + 0.3 * logits[1].log_softmax(-1)).log_softmax(-1)
            torch.testing.assert_close(torch.tensor(logprobs), expected[range(len(ids)), ids], atol=1e-4, rtol=1e-4)


def test_a_response_has_the_sum_of_its_tokens_log_probabilities(policies, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy, other = policies
    for (prompt, responses), ids in zip(
        MixtureSampler(policy, tokenizer, other, 0.0, **LIMITS)(GIVEN, 2, 5), PROMPTS, strict=True
    ):
        assert prompt.ids == ids
        for response in responses:
            with policy.with_own_attention() as model, torch.no_grad():
                logits = model(torch.tensor([ids + response.ids])).logits[0, len(ids) - 1 : -1]
            expected = logits.log_softmax(-1)[range(len(response.ids)), response.ids].sum().item()
            assert response.logprob == pytest.approx(expected, abs=1e-3)


def test_some_responses_are_the_policys_and_the_others_the_mixtures(policies, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy = EngineSampler(policies[0], tokenizer, **LIMITS)
    mixture = MixtureSampler(policies[0], tokenizer, policies[1], 1.0, **LIMITS)
    both = partly_from_mixture(policy, mixture, 2)(GIVEN, 3, 5)
    assert [Group(prompt, responses[:1]) for prompt, responses in both] == policy(GIVEN, 1, 5)
    assert [group.prompt for group in both] == GIVEN
    assert all(response.logprob is None for group in both for response in group.responses[1:])
    # These are not the policy's random numbers once more.
    alone = EngineSampler(policies[1], tokenizer, **LIMITS)(GIVEN, 2, 5)
    assert [ids[1:] for ids in response_ids(both)] != response_ids(alone)
    only_mixed = partly_from_mixture(policy, mixture, 2)(GIVEN, 2, 5)
    assert response_ids(only_mixed) == [ids[1:] for ids in response_ids(both)]
