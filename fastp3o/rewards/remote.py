"""Rewards from an endpoint."""

import hashlib
import json
import threading
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from fastp3o.endpoint import AnswerError, Answers, Endpoint
from fastp3o.rewards.config import TEXTS, RemoteConfig
from fastp3o.rollouts.groups import Group, Prompt, Response

# Rewards of this many newest responses are kept; each takes some 150 bytes.
REMEMBERED = 2**18

LARGEST = torch.finfo(torch.float32).max

# A prompt, its response, and the values of the columns.
Text = tuple


class RemoteReward:
    """Rewards from a URL, to which prompts, responses and columns of the data are posted.

    Equal responses to equal prompts are sent once. A key in the environment variable REWARD_API_KEY is sent along.

    Raises ValueError on a URL that cannot be one.
    """

    def __init__(self, url: str, config: RemoteConfig):
        self.endpoint = Endpoint(url, "REWARD_API_KEY", timeout=config.request_seconds, retries=config.reward_retries)
        self.fields = (*TEXTS, *config.columns)
        self.requests, self.batch_size = config.reward_requests, config.reward_batch_size
        self.scored: dict[bytes, float] = {}

    def __call__(self, groups: list[Group]) -> Tensor:
        """Finite values. Raises EndpointError if the endpoint refuses, or all attempts of a request fail."""
        columns = self.fields[len(TEXTS) :]
        texts = [
            (prompt.text, response.text, *(prompt.columns[name] for name in columns))
            for prompt, responses in groups
            for response in responses
        ]
        keys = [hashlib.sha256(json.dumps(text).encode()).digest() for text in texts]
        unknown = list({key: text for key, text in zip(keys, texts, strict=True) if key not in self.scored}.items())
        batches = [unknown[start : start + self.batch_size] for start in range(0, len(unknown), self.batch_size)]
        for answered in Answers(self.ask, batches, self.requests):
            self.scored |= answered
        rewards = torch.tensor([self.scored[key] for key in keys], dtype=torch.float32)
        for key in list(islice(self.scored, max(0, len(self.scored) - REMEMBERED))):
            del self.scored[key]
        return rewards.view(len(groups), -1)

    def ask(self, batch: Sequence[tuple[bytes, Text]], stopped: threading.Event) -> dict[bytes, float]:
        keys, texts = zip(*batch, strict=True)
        body = dict(zip(self.fields, zip(*texts, strict=True), strict=True))
        rewards = self.endpoint.post(body, lambda answer: read_rewards(answer, len(texts)), stopped)
        return dict(zip(keys, rewards, strict=True))

    def check(self, prompt: Prompt) -> None:
        """Asks for the reward of an empty response to a prompt. Raises as a call does."""
        self([Group(prompt, [Response([], "", False)])])


def read_rewards(answer: bytes, count: int) -> list[float]:
    """Raises AnswerError if the answer is not `count` finite numbers, ValueError if it is not JSON."""
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ValueError("which is not JSON") from error
    rewards = content.get("rewards") if isinstance(content, dict) else None
    if not isinstance(rewards, list):
        raise AnswerError("which is not an object with a list of `rewards`")
    if len(rewards) != count:
        raise AnswerError(f"which has {len(rewards)} rewards, for {count} responses")
    for index, reward in enumerate(rewards):
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not abs(reward) <= LARGEST:
            raise AnswerError(f"whose reward {index} is not a finite number of fp32")
    return rewards
