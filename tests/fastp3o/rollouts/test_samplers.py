"""What both samplers promise, the engine's and transformers'; texts that end a response."""

import re

import pytest
import torch
from transformers import GenerationConfig

from fastp3o.config import SamplerConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.models.packed_model import labeled_logprobs
from fastp3o.packing.pack import Packing, pack
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.rollouts.groups import Prompt, Response, finished, lengths
from fastp3o.training.loop import train
from tests.fastp3o.groups import flat, response_ids, tokenized
from tests.fastp3o.runs import assert_resumes, config, metrics

both_samplers = pytest.mark.parametrize("name", ["engine", "transformers"])


def draw(name, policy, tokenizer, seed=0, prompts=("a", "longer prompt", "b", "cc")):
    return make_sampler(name, policy, tokenizer, batch_size=3)(
        tokenized(tokenizer, prompts), 2, seed
    )


def make_sampler(name, policy, tokenizer, max_response_tokens=12, batch_size=4, **settings):
    limits = {"max_response_tokens": max_response_tokens, "batch_size": batch_size}
    return named_sampler(SamplerConfig(sampler=name, **settings), policy, tokenizer, **limits)


def first_tokens(name, policy, tokenizer, n=3000, **settings):
    """[n] tokens after the prompt "x", and the policy's log-probabilities of all tokens there."""
    prompt = tokenizer("x").input_ids
    sampler = make_sampler(name, policy, tokenizer, 1, 1, **settings)
    (group,) = sampler([Prompt("x", prompt)], n, 0)
    (row,) = pack(
        [prompt] * len(tokenizer), [[[token]] for token in range(len(tokenizer))], Packing(10_000)
    )
    logprobs = torch.empty(len(tokenizer))
    with torch.no_grad():
        logprobs[list(row.groups)] = labeled_logprobs(policy, row)
    return torch.tensor([response.ids[0] for response in group.responses]), logprobs


@both_samplers
def test_two_responses_to_each_prompt_are_cut_after_their_end_and_repeat_themselves(
    name, tiny_model, tokenizer
):
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
    one, other = (
        make_sampler(name, policy, tokenizer)(tokenized(tokenizer, ["a"], [n]), 2, 0)
        for n in (0, 1)
    )
    assert response_ids(one) != response_ids(other)


@both_samplers
def test_the_checkpoints_own_sampling_settings_do_not_apply(name, tiny_model, tokenizer):
    policy = load_policy(tiny_model).train()
    expected = draw(name, policy, tokenizer)
    own = GenerationConfig(
        top_k=1, repetition_penalty=5.0, no_repeat_ngram_size=1, eos_token_id=tokenizer.eos_token_id
    )
    policy.model.generation_config = own
    assert draw(name, policy, tokenizer) == expected
    assert policy.model.generation_config is own
    assert policy.training


@both_samplers
def test_samples_follow_the_policys_distribution_as_the_settings_cut_it(
    name, tiny_model, tokenizer
):
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


@both_samplers
def test_a_response_ends_with_the_token_that_completes_the_first_stop_string(
    name, tiny_model, tokenizer
):
    policy = load_policy(tiny_model)

    def draw(stops: list[str] | None) -> list[Response]:
        sampler = make_sampler(name, policy, tokenizer, 40, stop_strings=stops)
        return flat(sampler(tokenized(tokenizer, ("a", "bc")), 8, 0))

    whole = draw(None)
    # two tokens
    stop = next(pair for response in whole for pair in re.findall(r"[!-~]{2}", response.text[2:]))
    several, single = draw([stop]), draw([stop[0]])
    for uncut, response in zip(whole, several, strict=True):
        assert response.ids == uncut.ids[: len(response.ids)]
        cut = len(response.ids) < len(uncut.ids)
        assert cut == (stop in uncut.text[:-1])
        assert (stop in response.text) == response.text.endswith(stop)
        assert response.finished == (uncut.finished or stop in uncut.text)
        if response.logprobs is not None:
            assert response.logprobs == uncut.logprobs[: len(response.ids)]
    assert any(response.text.endswith(stop) for response in several)
    # A token that holds one ends the response as it is sampled, so that the engine's next ones
    # begin earlier.
    assert any(response.text.endswith(stop[0]) and response.finished for response in single)
    assert all(stop[0] not in response.text[:-1] for response in single)


def test_a_run_learns_to_end_with_a_stop_string_and_resumes_with_rounds_ahead(
    tiny_model, workplace
):
    stops = {
        "stop_strings": list("abcdefghijklmnop"),
        "rounds_ahead": 1,
        "save_minutes": 1e-9,
        "updates": 3,
    }
    train(run := config(tiny_model, "run", **stops))
    assert any(line["missing_eos"] < 1 for line in metrics("run"))
    assert_resumes(run)


@pytest.mark.parametrize("value", ["</answer>", '{"a": 1}', '[""]', "[1]", "["])
def test_what_is_no_list_of_texts_is_refused(value):
    with pytest.raises(UserError, match="--stop_strings must be a JSON list of texts"):
        SamplerConfig(stop_strings=value)
