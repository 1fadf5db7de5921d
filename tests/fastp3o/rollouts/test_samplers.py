import pytest
import torch
from transformers import GenerationConfig

from fastp3o.config import SamplerConfig
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labelled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.rollouts.groups import Prompt, finished, lengths, texts
from tests.fastp3o.groups import response_ids, tokenised

pytestmark = pytest.mark.parametrize("name", ["engine", "transformers"])


def draw(name, policy, tokenizer, seed=0, batch_size=4, prompts=("a", "longer prompt", "b", "cc")):
    return make_sampler(name, policy, tokenizer, batch_size=batch_size)(tokenised(tokenizer, prompts), 2, seed)


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


@pytest.fixture
def peaked_policy(tiny_model):
    policy = load_policy(tiny_model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)
    return policy


def test_two_responses_to_each_prompt(name, tiny_model, tokenizer):
    groups = draw(name, load_policy(tiny_model), tokenizer, batch_size=3)
    assert [group.prompt.text for group in groups] == ["a", "longer prompt", "b", "cc"]
    assert finished(groups).shape == (4, 2)
    prompts, responses = texts(groups)
    assert prompts == ["a", "a", "longer prompt", "longer prompt", "b", "b", "cc", "cc"]
    assert responses == [response.text for group in groups for response in group.responses]
    assert ((lengths(groups) >= 1) & (lengths(groups) <= 12)).all()
    for response in (response for group in groups for response in group.responses):
        assert response.finished == (response.ids[-1] == tokenizer.eos_token_id)
        assert tokenizer.eos_token_id not in response.ids[:-1]
        assert response.text == tokenizer.decode(response.ids, skip_special_tokens=True)


def test_equal_seeds_give_equal_responses(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    first, again, other = (response_ids(draw(name, policy, tokenizer, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other


def test_processes_that_share_a_seed_sample_apart(name, tiny_model, tokenizer):
    sampler = make_sampler(name, load_policy(tiny_model), tokenizer)
    (first, second), (other, _) = (
        response_ids(sampler(tokenised(tokenizer, ["a", "a"], numbers), 2, 0)) for numbers in ([0, 2], [1, 3])
    )
    responses = [*first, *second, *other]
    assert all(response not in responses[:i] for i, response in enumerate(responses))


def test_the_checkpoints_own_sampling_settings_do_not_apply(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model).train()
    expected = draw(name, policy, tokenizer)
    policy.model.generation_config = GenerationConfig(
        top_k=1, repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=tokenizer.eos_token_id
    )
    own = policy.model.generation_config
    assert draw(name, policy, tokenizer) == expected
    assert policy.model.generation_config is own
    assert policy.training


def test_samples_follow_the_policys_distribution(name, peaked_policy, tokenizer):
    first, logprobs = first_tokens(name, peaked_policy, tokenizer)
    top = first.bincount().argmax().item()
    p = logprobs[top].exp().item()
    assert abs((first == top).float().mean().item() - p) < 5 * (p * (1 - p) / 3000) ** 0.5


def test_so_they_do_with_settings(name, peaked_policy, tokenizer):
    cold = (first_tokens(name, peaked_policy, tokenizer, 1)[1] / 0.5).log_softmax(0)
    peaked_policy.temperature = 0.5
    first, logprobs = first_tokens(name, peaked_policy, tokenizer, top_k=3)
    torch.testing.assert_close(logprobs, cold)
    likely = logprobs.topk(3).indices
    assert set(first.tolist()) == set(likely.tolist())
    for token, p in zip(likely, logprobs[likely].softmax(0), strict=True):
        assert abs((first == token).float().mean() - p) < 5 * (p * (1 - p) / 3000) ** 0.5
    first, logprobs = first_tokens(name, peaked_policy, tokenizer, min_p=0.99)
    assert first.unique().tolist() == [logprobs.argmax()]
