"""Two prompts with two responses each, one of which has no end."""

import pytest

from fastp3o.rollouts.groups import Group, Prompt, Response


@pytest.fixture
def rollouts(tokenizer) -> list[Group]:
    def response(text: str, finished: bool) -> Response:
        return Response(
            tokenizer(text).input_ids + [tokenizer.eos_token_id] * finished, text, finished
        )

    return [
        Group(
            Prompt("Say a:", tokenizer("Say a:").input_ids, 0),
            [response(" aei", True), response(" xyz", False)],
        ),
        Group(
            Prompt("Say b:", tokenizer("Say b:").input_ids, 1),
            [response(" o", True), response(" u", True)],
        ),
    ]
