"""Two prompts with two responses each, one of which has no end."""

import pytest

from fastp3o.rollouts.rollouts import Rollouts


@pytest.fixture
def rollouts(tokenizer) -> Rollouts:
    prompts, responses = ["Say a:", "Say b:"], [[" aei", " xyz"], [" o", " u"]]
    finished = [[True, False], [True, True]]
    return Rollouts(
        prompts=prompts,
        prompt_ids=[tokenizer(prompt).input_ids for prompt in prompts],
        responses=responses,
        response_ids=[
            [
                tokenizer(text).input_ids + [tokenizer.eos_token_id] * finished
                for text, finished in zip(*group, strict=True)
            ]
            for group in zip(responses, finished, strict=True)
        ],
        finished=finished,
    )
