import pytest
import torch
from transformers import GenerationConfig

from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import scored_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.named_sampler import named_sampler
from fastp3o.rollouts.sampling_settings import SamplingSettings

pytestmark = pytest.mark.parametrize("name", ["engine", "transformers"])


def draw(name, policy, tokenizer, seed=0, batch_size=4, prompts=("a", "longer prompt", "b", "cc")):
    sampler = named_sampler(name, policy, tokenizer, max_response_tokens=12, batch_size=batch_size)
    return sampler(list(prompts), tokenizer(list(prompts)).input_ids, responses_per_prompt=2, seed=seed)


def first_tokens(name, policy, tokenizer, n=3000, **settings):
    """[n] tokens after the prompt "x", and the policy's log-probabilities of all tokens there."""
    prompt = tokenizer("x").input_ids
    sampler = named_sampler(
        name, policy, tokenizer, max_response_tokens=1, batch_size=1, settings=SamplingSettings(**settings)
    )
    rollouts = sampler(["x"], [prompt], responses_per_prompt=n, seed=0)
    (row,) = pack([prompt] * len(tokenizer), [[[token]] for token in range(len(tokenizer))], Packing(10_000))
    logprobs = torch.empty(len(tokenizer))
    with torch.no_grad():
        logprobs[list(row.groups)] = scored_logprobs(policy, row)
    return torch.tensor([ids[0] for ids in rollouts.response_ids[0]]), logprobs


@pytest.fixture
def peaked_policy(tiny_model):
    policy = load_policy(tiny_model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)
    return policy


def test_two_responses_to_each_prompt(name, tiny_model, tokenizer):
    rollouts = draw(name, load_policy(tiny_model), tokenizer, batch_size=3)
    assert rollouts.prompts == ["a", "longer prompt", "b", "cc"]
    assert (len(rollouts), rollouts.responses_per_prompt) == (4, 2)
    prompts, responses = rollouts.texts()
    assert prompts == ["a", "a", "longer prompt", "longer prompt", "b", "b", "cc", "cc"]
    assert responses == [response for group in rollouts.responses for response in group]
    assert all(1 <= length <= 12 for group in rollouts.response_lengths for length in group)
    for group, finished in zip(rollouts.response_ids, rollouts.finished, strict=True):
        assert finished == [ids[-1] == tokenizer.eos_token_id for ids in group]
        assert all(tokenizer.eos_token_id not in ids[:-1] for ids in group)


def test_equal_seeds_give_equal_responses(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    assert draw(name, policy, tokenizer).response_ids == draw(name, policy, tokenizer).response_ids
    assert draw(name, policy, tokenizer).response_ids != draw(name, policy, tokenizer, seed=1).response_ids


def test_processes_that_share_a_seed_sample_apart(name, tiny_model, tokenizer):
    sampler = named_sampler(name, load_policy(tiny_model), tokenizer, max_response_tokens=12, batch_size=4)
    prompts = ["a", "a"], tokenizer(["a", "a"]).input_ids
    (first, second), (other, _) = (
        sampler(*prompts, numbers, responses_per_prompt=2, seed=0).response_ids for numbers in ([0, 2], [1, 3])
    )
    responses = [*first, *second, *other]
    assert all(response not in responses[:i] for i, response in enumerate(responses))


def test_the_checkpoints_own_sampling_settings_do_not_apply(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model).train()
    expected = draw(name, policy, tokenizer).response_ids
    policy.model.generation_config = GenerationConfig(
        top_k=1, repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=tokenizer.eos_token_id
    )
    own = policy.model.generation_config
    assert draw(name, policy, tokenizer).response_ids == expected
    assert policy.model.generation_config is own
    assert policy.training


def test_samples_follow_the_policys_distribution(name, peaked_policy, tokenizer):
    first, logprobs = first_tokens(name, peaked_policy, tokenizer)
    top = first.bincount().argmax().item()
    p = logprobs[top].exp().item()
    assert abs((first == top).float().mean().item() - p) < 5 * (p * (1 - p) / 3000) ** 0.5


def test_so_they_do_with_settings(name, peaked_policy, tokenizer):
    first, logprobs = first_tokens(name, peaked_policy, tokenizer, temperature=0.5, top_k=3)
    likely = logprobs.topk(3).indices
    assert set(first.tolist()) == set(likely.tolist())
    for token, p in zip(likely, (logprobs[likely] / 0.5).softmax(0), strict=True):
        assert abs((first == token).float().mean() - p) < 5 * (p * (1 - p) / 3000) ** 0.5
    first, logprobs = first_tokens(name, peaked_policy, tokenizer, min_p=0.99)
    assert first.unique().tolist() == [logprobs.argmax()]
