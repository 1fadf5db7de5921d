"""Environments for tests, and the settings of runs that train on their trajectories.

A flag names one as `tests.fastp3o.rollouts.environments:Echo`.
"""

import asyncio
import os
import time

from fastp3o.objectives.config.p3o import P3OConfig
from tests.fastp3o.runs import config

# Of the tiny model's first tokens, enough end a turn.
LETTERS = list("abcdefghijklmnopqrstuvwxyz0123456789,.;:!?-+*/ ")
SETTINGS = {
    "max_turns": 3,
    "max_turn_tokens": 4,
    "max_response_tokens": 24,
    "reward": "",
    "updates": 3,
}
SETTINGS |= {"stop_strings": LETTERS}


def games(tiny_model, folder, config_class=P3OConfig, **changes):
    return config(tiny_model, folder, config_class, **SETTINGS | changes)


class Echo:
    """Says how long the turn was. Trajectories have one to three turns, by their first one's
    length.
    """

    rewards = {"turns": 1.0, "even": 0.5}  # noqa: RUF012

    def reset(self, prompt):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        self.most = 1 + len(text) % 3 if self.turns == 1 else self.most
        done = self.turns >= self.most
        return None if done else f"[{len(text)}]", {"turns": 1, "even": self.turns % 2 == 0}, done


class AsyncEcho(Echo):
    async def step(self, text):
        await asyncio.sleep(0.001 * (len(text) % 3))
        return super().step(text)


class Greets(AsyncEcho):
    """Begins with an observation."""

    def reset(self, prompt):
        super().reset(prompt)
        return f"{len(prompt)}?"


class Words(Echo):
    """Asks for a column."""

    def reset(self, prompt, word):
        assert prompt == f"Say {word}:"
        super().reset(prompt)


class Long(Echo):
    """Three turns."""

    def step(self, text):
        self.turns += 1
        return "[", {"turns": 1, "even": 0.1 * len(text)}, self.turns == 3


class Elsewhere(Greets):
    """Works in a folder of its own for a while, and comes back."""

    async def step(self, text):
        back = os.getcwd()
        os.chdir("/")
        time.sleep(0.01)
        os.chdir(back)
        return await super().step(text)


class HangsLater(Echo):
    """Answers two rounds of 16 trajectories."""

    begun = 0

    def reset(self, prompt):
        super().reset(prompt)
        type(self).begun += 1

    def step(self, text):
        return super().step(text) if self.begun <= 2 * 16 else time.sleep(600)


class OneTurn:
    def reset(self):
        """Every trajectory begins with its prompt."""

    def step(self, text):
        return None, float(len(text)), True
