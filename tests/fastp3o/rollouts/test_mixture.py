"""A mixture of two policies: of all its weight on one, it is that one; and tokens come with the
mixture's log-probs.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.groups import Group, Prompt
from fastp3o.rollouts.mixture import MixtureSampler, partly_from_mixture
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
def test_at_its_ends_the_mixture_is_one_of_the_two(policies, tokenizer, weight):
    mixed = response_ids(
        MixtureSampler(policies[0], tokenizer, policies[1], weight, **LIMITS)(GIVEN, 3, 5)
    )
    assert mixed == response_ids(EngineSampler(policies[weight], tokenizer, **LIMITS)(GIVEN, 3, 5))
    assert mixed != response_ids(
        EngineSampler(policies[1 - weight], tokenizer, **LIMITS)(GIVEN, 3, 5)
    )


@torch.no_grad()
def test_tokens_come_with_the_log_probabilities_of_the_mixture(policies, tokenizer):
    for prompt, responses in MixtureSampler(policies[0], tokenizer, policies[1], 0.3, **LIMITS)(
        GIVEN, 2, 5
    ):
        for response in responses:
            logits = []
            for policy in policies:
                with policy.with_own_attention() as model:
                    logits.append(
                        model(torch.tensor([prompt.ids + response.ids])).logits[
                            0, len(prompt.ids) - 1 : -1
                        ]
                    )
            mixed = (0.7 * logits[0].log_softmax(-1) + 0.3 * logits[1].log_softmax(-1)).log_softmax(
                -1
            )
            expected = mixed[range(len(response.ids)), response.ids]
            torch.testing.assert_close(
                torch.tensor(response.logprobs), expected, atol=1e-4, rtol=1e-4
            )


def test_some_responses_are_the_policys_and_the_others_the_mixtures(policies, tokenizer):
    policy = EngineSampler(policies[0], tokenizer, **LIMITS)
    mixture = MixtureSampler(policies[0], tokenizer, policies[1], 1.0, **LIMITS)
    both = partly_from_mixture(policy, mixture, 2)(GIVEN, 3, 5)
    assert [Group(prompt, responses[:1]) for prompt, responses in both] == policy(GIVEN, 1, 5)
    assert [group.prompt for group in both] == GIVEN
    assert all(response.logprobs is None for group in both for response in group.responses[1:])
    # These are not the policy's random numbers once more.
    alone = EngineSampler(policies[1], tokenizer, **LIMITS)(GIVEN, 2, 5)
    assert [ids[1:] for ids in response_ids(both)] != response_ids(alone)
    only_mixed = partly_from_mixture(policy, mixture, 2)(GIVEN, 2, 5)
    assert response_ids(only_mixed) == [ids[1:] for ids in response_ids(both)]
