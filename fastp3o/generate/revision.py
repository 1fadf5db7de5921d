"""Critique and revision by principles: the supervised phase of Constitutional AI (arXiv 2212.08073,
section 3).

An environment asks for them: the turns of a trajectory are a response, a critique, a revision, a
critique, ...
"""

import json
from random import Random
from typing import Any

from fastp3o.errors import UserError
from fastp3o.files import read_text
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
    lines = filter(str.strip, read_text(path, "principles").splitlines())
    principles = []
    for number, line in enumerate(lines, start=1):
        try:
            if path.endswith(".jsonl"):
                requests = json.loads(line)
            else:
                requests = {name: request + line for name, request in REQUESTS.items()}
            principles.append([requests[name].strip() for name in REQUESTS])
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UserError(
                f'{path}: principle {number} must have the texts "critique" and "revision"'
            ) from error
    return principles


def revising(
    principles: list[list[str]], *, rounds: int, turn_tokens: int, chats: bool, room: int, seed: int
) -> dict[str, Any]:
    """The options under which the policy revises its responses: an environment that asks for it,
    and room for its turns.

    principles: of `read_principles`. rounds: of a critique and a revision. turn_tokens: a turn's at
    most. chats: whether requests are a user's messages. room: tokens of all turns.
    """

    class Principles:
        """Draws a principle for each round, which depends on the seed and on what is revised."""

        def reset(self, prompt: str) -> None:
            self.prompt, self.turn = prompt, 0

        def step(self, text: str) -> tuple[str | None, float, bool]:
            answers_revision = self.turn % 2 == 1
            if not answers_revision:  # a round begins
                random = Random(json.dumps([seed, self.turn, self.prompt, text]))
                self.critique, self.revision = random.choice(principles)
            if answers_revision:
                name, request = "Revision", self.revision
            else:
                name, request = "Critique", self.critique
            over = self.turn == 2 * rounds or not text.strip()
            self.turn += 1
            observation = request if chats else f"\n\n{name} Request: {request}\n\n{name}:"
            return observation, 0.0, over

    return {
        "environment": InMemory("principles", Principles),
        "max_turns": 1 + 2 * rounds,
        "max_turn_tokens": turn_tokens,
        "max_response_tokens": room,
        "observation_role": "user" if chats else "text",
        # The policy that samples keeps nothing and reads no principles: the environment does.
        "keep": "none",
        "principles": None,
        "revisions": 1,
    }
