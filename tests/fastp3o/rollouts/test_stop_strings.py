"""Texts that end a response, of one token and of several."""

import re

import pytest

from fastp3o.config import SamplerConfig
from fastp3o.errors import UserError
from fastp3o.models.loading import load_policy
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.rollouts.engine_sampler import named_sampler
from fastp3o.training.loop import train
from tests.fastp3o.groups import tokenised
from tests.fastp3o.runs import assert_resumes, config, metrics


def draw(name, tiny_model, tokenizer, stops):
    sampler_config = SamplerConfig(sampler=name, stop_strings=stops)
    sampler = named_sampler(sampler_config, load_policy(tiny_model), tokenizer, max_response_tokens=40, batch_size=4)
    return [response for group in sampler(tokenised(tokenizer, ("a", "bc")), 8, 0) for response in group.responses]


@pytest.mark.parametrize("name", ["engine", "transformers"])
def test_a_response_ends_with_the_token_that_completes_the_first_stop_string(name, tiny_model, tokenizer):
    whole = draw(name, tiny_model, tokenizer, None)
    stop = next(pair for response in whole for pair in re.findall(r"[!-~]{2}", response.text[2:]))  # two tokens
    several, single = draw(name, tiny_model, tokenizer, [stop]), draw(name, tiny_model, tokenizer, [stop[0]])
    for uncut, response in zip(whole, several, strict=True):
        assert response.ids == uncut.ids[: len(response.ids)]
        cut = len(response.ids) < len(uncut.ids)
        assert cut == (stop in uncut.text[:-1])
        assert (stop in response.text) == response.text.endswith(stop)
        assert response.finished == (uncut.finished or stop in uncut.text)
        if response.logprobs is not None:
            assert response.logprobs == uncut.logprobs[: len(response.ids)]
    assert any(response.text.endswith(stop) for response in several)
    # A token that holds one ends the response as it is sampled, so that the engine's next ones begin earlier.
    assert any(response.text.endswith(stop[0]) and response.finished for response in single)
    assert all(stop[0] not in response.text[:-1] for response in single)


def test_a_run_learns_to_end_with_a_stop_string_and_resumes_with_rounds_ahead(tiny_model, workplace):
    stops = {"stop_strings": list("abcdefghijklmnop"), "rounds_ahead": 1, "save_minutes": 1e-9, "updates": 3}
    train(run := config(tiny_model, "run", P3OConfig, **stops))
    assert any(line["missing_eos"] < 1 for line in metrics("run"))
    assert_resumes(run)


@pytest.mark.parametrize("value", ["</answer>", '{"a": 1}', '[""]', "[1]", "["])
def test_what_is_no_list_of_texts_is_refused(value):
    with pytest.raises(UserError, match="--stop_strings must be a JSON list of texts"):
        SamplerConfig(stop_strings=value)
