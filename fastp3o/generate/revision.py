"""Critique and revision by principles: the supervised phase of Constitutional AI (arXiv 2212.08073,
section 3).

An environment asks for them: the turns of a trajectory are a response, a critique, a revision, a
critique, ...
"""

import json
from dataclasses import replace
from random import Random
from typing import Any

from fastp3o.errors import UserError
from fastp3o.files import read_text
from fastp3o.generate.config import GenerateConfig
from fastp3o.sources import InMemory

# Of a principle in words.
REQUESTS = {
    "critique": "Criticise your response by this principle: ",
    "revision": "Rewrite it to follow this one: ",
}


def read_principles(path: str) -> list[list[str]]:
    """The requests for a critique and a revision, of a principle a line; the lines of a .jsonl file
    have them both.
    """
    principles = []
    for number, line in enumerate(
        filter(str.strip, read_text(path, "principles").splitlines()), start=1
    ):
        try:
            asked = (
                json.loads(line)
                if path.endswith(".jsonl")
                else {name: REQUESTS[name] + line for name in REQUESTS}
            )
            principles.append([asked[name].strip() for name in REQUESTS])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f'{path}: principle {number} must have the texts "critique" and "revision"'
            ) from error
    return principles


def revising(config: GenerateConfig, *, chats: bool, room: int) -> GenerateConfig:
    """The configuration with the environment. chats: its requests are a user's messages. room:
    tokens of all turns.
    """
    principles = read_principles(config.principles or "")
    rounds = config.revisions
    seed = config.seed

    class Principles:
        """Draws a principle for each round, which depends on the seed and on what is revised."""

        def reset(self, prompt: str) -> None:
            self.prompt, self.turn = prompt, 0

        def step(self, text: str) -> tuple[str | None, float, bool]:
            if self.turn % 2 == 0:
                self.requests = Random(json.dumps([seed, self.turn, self.prompt, text])).choice(
                    principles
                )
            name, request = ("Critique", "Revision")[self.turn % 2], self.requests[self.turn % 2]
            over = self.turn == 2 * rounds or not text.strip()
            self.turn += 1
            return request if chats else f"\n\n{name} Request: {request}\n\n{name}:", 0.0, over

    turns = {
        "max_turns": 1 + 2 * rounds,
        "max_turn_tokens": config.max_response_tokens,
        "max_response_tokens": room,
    }
    role = {"observation_role": "user" if chats else "text"}
    changes: dict[str, Any] = turns | role | {"keep": "none", "principles": None, "revisions": 1}
    return replace(config, environment=InMemory("principles", Principles), **changes)
