"""A mixture of two policies: of all its weight on one, it is that one; and tokens come with the mixture's log-probs."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.models.packed_model import PackedModel
from fastp3o.rollouts.engine_sampler import EngineSampler
from fastp3o.rollouts.mixture import MixtureSampler, PartlyFromMixture

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]
GIVEN = (["a", "b", "c"], PROMPTS)
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
    mixed = mixture(*GIVEN, responses_per_prompt=3, seed=5)
    alone = EngineSampler(policies[weight], tokenizer, **LIMITS)(*GIVEN, responses_per_prompt=3, seed=5)
    assert mixed.response_ids == alone.response_ids
    other = EngineSampler(policies[1 - weight], tokenizer, **LIMITS)(*GIVEN, responses_per_prompt=3, seed=5)
    assert mixed.response_ids != other.response_ids


@torch.no_grad()
def test_tokens_come_with_the_log_probabilities_of_the_mixture(policies, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    rollouts = MixtureSampler(*[policies[0], tokenizer, policies[1]], 0.3, **LIMITS)(
        *GIVEN, responses_per_prompt=2, seed=5
    )
    for prompt, group, group_logprobs in zip(PROMPTS, rollouts.response_ids, rollouts.logprobs, strict=True):
        for ids, logprobs in zip(group, group_logprobs, strict=True):
            row = torch.tensor([prompt + ids])
            logits = []
            for policy in policies:
                with policy.with_own_attention() as model:
                    logits.append(model(row).logits[0, len(prompt) - 1 : -1])
            expected = (0.7 * logits[0].log_softmax(-1) + 0.3 * logits[1].log_softmax(-1)).log_softmax(-1)
            torch.testing.assert_close(torch.tensor(logprobs), expected[range(len(ids)), ids], atol=1e-4, rtol=1e-4)


def test_some_responses_are_the_policys_and_the_others_the_mixtures(policies, tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    policy = EngineSampler(policies[0], tokenizer, **LIMITS)
    mixture = MixtureSampler(policies[0], tokenizer, policies[1], 1.0, **LIMITS)
    both = PartlyFromMixture(policy, mixture, 2)(*GIVEN, responses_per_prompt=3, seed=5)
    own = policy(*GIVEN, responses_per_prompt=1, seed=5)
    assert [group[:1] for group in both.response_ids] == own.response_ids
    assert both.responses_per_prompt == 3
    assert both.logprobs is None
    # Not the policy's random numbers once more.
    alone = EngineSampler(policies[1], tokenizer, **LIMITS)(*GIVEN, responses_per_prompt=2, seed=5)
    assert [group[1:] for group in both.response_ids] != alone.response_ids
