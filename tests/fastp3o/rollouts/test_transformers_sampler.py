import torch
from transformers import GenerationConfig

from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import scored_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.end_of_sequence import cut_after_end
from fastp3o.rollouts.transformers_sampler import TransformersSampler


def draw(policy, tokenizer, seed=0, batch_size=4, prompts=("a", "longer prompt", "b", "cc")):
    sampler = TransformersSampler(policy, tokenizer, max_response_tokens=12, batch_size=batch_size)
    return sampler(list(prompts), tokenizer(list(prompts)).input_ids, responses_per_prompt=2, seed=seed)


def test_two_responses_to_each_prompt(tiny_model, tokenizer):
    rollouts = draw(load_policy(tiny_model), tokenizer, batch_size=3)
    assert rollouts.prompts == ["a", "longer prompt", "b", "cc"]
    assert (len(rollouts), rollouts.responses_per_prompt) == (4, 2)
    prompts, responses = rollouts.texts()
    assert prompts == ["a", "a", "longer prompt", "longer prompt", "b", "b", "cc", "cc"]
    assert responses == [response for group in rollouts.responses for response in group]
    assert all(1 <= length <= 12 for group in rollouts.response_lengths for length in group)
    for group, finished in zip(rollouts.response_ids, rollouts.finished, strict=True):
        assert finished == [ids[-1] == tokenizer.eos_token_id for ids in group]
        assert all(tokenizer.eos_token_id not in ids[:-1] for ids in group)


def test_equal_seeds_give_equal_responses(tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    assert draw(policy, tokenizer).response_ids == draw(policy, tokenizer).response_ids
    assert draw(policy, tokenizer).response_ids != draw(policy, tokenizer, seed=1).response_ids


def test_the_checkpoints_own_sampling_settings_do_not_apply(tiny_model, tokenizer):
    policy = load_policy(tiny_model).train()
    expected = draw(policy, tokenizer).response_ids
    policy.model.generation_config = GenerationConfig(
        top_k=1, repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=tokenizer.eos_token_id
    )
    own = policy.model.generation_config
    assert draw(policy, tokenizer).response_ids == expected
    assert policy.model.generation_config is own
    assert policy.training


def test_samples_follow_the_policys_distribution(tiny_model, tokenizer):
    policy = load_policy(tiny_model)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(3.0)
    prompt = tokenizer("x").input_ids
    sampler = TransformersSampler(policy, tokenizer, max_response_tokens=1, batch_size=1)
    rollouts = sampler(["x"], [prompt], responses_per_prompt=3000, seed=0)
    first = torch.tensor([ids[0] for ids in rollouts.response_ids[0]])
    top = first.bincount().argmax().item()
    (row,) = pack([prompt], [[[top]]], Packing(64))
    p = scored_logprobs(policy, row).exp().item()
    assert abs((first == top).float().mean().item() - p) < 5 * (p * (1 - p) / 3000) ** 0.5


def test_a_response_ends_at_its_first_end():
    assert cut_after_end([5, 2, 6, 2], {2}) == [5, 2]
    assert cut_after_end([5, 6], {2}) == [5, 6]
