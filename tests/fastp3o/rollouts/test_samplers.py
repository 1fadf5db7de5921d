"""What both samplers promise, the engine's and transformers'."""

import pytest
import torch
from transformers import GenerationConfig

from fastp3o.config import SamplerConfig
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.rollouts.groups import Prompt, finished, lengths
from tests.fastp3o.groups import response_ids, tokenised

both_samplers = pytest.mark.parametrize("name", ["engine", "transformers"])


def draw(name, policy, tokenizer, seed=0, prompts=("a", "longer prompt", "b", "cc")):
    return make_sampler(name, policy, tokenizer, batch_size=3)(tokenised(tokenizer, prompts), 2, seed)


def make_sampler(name, policy, tokenizer, max_response_tokens=12, batch_size=4, **settings):
    limits = {"max_response_tokens": max_response_tokens, "batch_size": batch_size}
    return named_sampler(SamplerConfig(sampler=name, **settings), policy, tokenizer, **limits)


def first_tokens(name, policy, tokenizer, n=3000, **settings):
    """[n] tokens after the prompt "x", and the policy's log-probabilities of all tokens there."""
    prompt = tokenizer("x").input_ids
    sampler = make_sampler(name, policy, tokenizer, 1, 1, **settings)
    (group,) = sampler([Prompt("x", prompt)], n, 0)
    (row,) = pack([prompt] * len(tokenizer), [[[token]] for token in range(len(tokenizer))], Packing(10_000))
    logprobs = torch.empty(len(tokenizer))
    with torch.no_grad():
        logprobs[list(row.groups)] = labelled_logprobs(policy, row)
    return torch.tensor([response.ids[0] for response in group.responses]), logprobs


@both_samplers
def test_two_responses_to_each_prompt_are_cut_after_their_end_and_repeat_themselves(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    # A third of the tokens end a response.
    policy.model.generation_config.eos_token_id = ends = list(range(0, len(tokenizer), 3))
    groups = draw(name, policy, tokenizer)
    assert [group.prompt.text for group in groups] == ["a", "longer prompt", "b", "cc"]
    assert finished(groups).shape == (4, 2)
    assert ((lengths(groups) >= 1) & (lengths(groups) <= 12)).all()
    assert finished(groups).any()
    for response in (response for group in groups for response in group.responses):
        assert response.finished == (response.ids[-1] in ends)
        assert not set(ends) & set(response.ids[:-1])
        assert response.finished or len(response.ids) == 12
        assert response.text == tokenizer.decode(response.ids, skip_special_tokens=True)
    assert response_ids(draw(name, policy, tokenizer)) == response_ids(groups)
    assert response_ids(draw(name, policy, tokenizer, seed=1)) != response_ids(groups)
    # Processes that share a seed differ in the numbers of their prompts.
    one, other = (make_sampler(name, policy, tokenizer)(tokenised(tokenizer, ["a"], [n]), 2, 0) for n in (0, 1))
    assert response_ids(one) != response_ids(other)


@both_samplers
def test_the_checkpoints_own_sampling_settings_do_not_apply(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model).train()
    expected = draw(name, policy, tokenizer)
    own = GenerationConfig(top_k=1, repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=tokenizer.eos_token_id)
    policy.model.generation_config = own
    assert draw(name, policy, tokenizer) == expected
    assert policy.model.generation_config is own
    assert policy.training


@both_samplers
def test_samples_follow_the_policys_distribution_as_the_settings_cut_it(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    for parameter in policy.parameters():
        parameter.data *= 3.0
    for temperature, k in ((1.0, 0), (0.5, 3)):
        expected = (first_tokens(name, policy, tokenizer, 1)[1] / temperature).log_softmax(0)
        policy.temperature = temperature
        first, logprobs = first_tokens(name, policy, tokenizer, top_k=k)
        torch.testing.assert_close(logprobs, expected)
        likely = logprobs.topk(3).indices
        assert not k or set(first.tolist()) == set(likely.tolist())
        kept = likely if k else torch.arange(len(logprobs))
        shares = torch.zeros_like(logprobs).index_put((kept,), logprobs[kept].softmax(0))
        for token in likely:
            p = shares[token]
            assert abs((first == token).float().mean() - p) < 5 * (p * (1 - p) / 3000) ** 0.5
    first, logprobs = first_tokens(name, policy, tokenizer, min_p=0.99)
    assert first.unique().tolist() == [logprobs.argmax()]
