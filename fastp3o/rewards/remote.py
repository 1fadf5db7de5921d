"""Rewards from an endpoint."""

import json
import threading
from math import nan

import torch
from torch import Tensor

from fastp3o.calls.answers import Answers
from fastp3o.calls.endpoint import AnswerError, Endpoint
from fastp3o.rewards.config import REQUEST_SECONDS, TEXTS, RemoteConfig
from fastp3o.rollouts.groups import Group, Prompt, Response

LARGEST = torch.finfo(torch.float32).max


class RemoteReward:
    """Rewards from a URL, to which prompts, responses and columns of the data are posted. A key in
    the environment variable REWARD_API_KEY is sent along. Raises ValueError on a URL that cannot be
    one.
    """

    def __init__(self, url: str, config: RemoteConfig):
        timeout = config.reward_timeout or REQUEST_SECONDS
        self.endpoint = Endpoint(
            url, "REWARD_API_KEY", timeout=timeout, retries=config.reward_retries
        )
        self.fields = (*TEXTS, *config.columns)
        self.requests, self.batch_size = config.reward_requests, config.reward_batch_size
        self.passes = False  # whether null leaves a response to the next reward of a cascade

    def __call__(self, groups: list[Group]) -> Tensor:
        """Finite values, NaN for what it passes on. A prompt's responses go in one request: an
        endpoint may compare them. Raises EndpointError if the endpoint refuses or keeps failing.
        """
        columns = self.fields[len(TEXTS) :]
        texts = [
            (prompt.text, response.text, *(prompt.columns[name] for name in columns))
            for prompt, responses in groups
            for response in responses
        ]
        rewards = torch.empty(len(texts))

        responses = len(groups[0].responses)
        size = max(1, self.batch_size // responses) * responses

        def ask(start: int, stopped: threading.Event) -> None:
            batch = texts[start : start + size]
            body = dict(zip(self.fields, zip(*batch, strict=True), strict=True))
            answer = self.endpoint.post(
                body, lambda answer: read_rewards(answer, len(batch), self.passes), stopped
            )
            rewards[start : start + len(batch)] = torch.tensor(answer)

        for _ in Answers(ask, range(0, len(texts), size), self.requests):
            pass
        return rewards.view(len(groups), -1)

    def check(self, prompt: Prompt) -> None:
        """Asks for the reward of an empty response to a prompt. Raises as a call does."""
        self([Group(prompt, [Response([], "", False)])])


def read_rewards(answer: bytes, count: int, passes: bool = False) -> list[float]:
    """Raises AnswerError if the answer is not `count` finite numbers, ValueError if it is not JSON.
    passes: whether null may stand for a number; it becomes NaN.
    """
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
        if reward is None and passes:
            rewards[index] = nan
        elif (
            isinstance(reward, bool)
            or not isinstance(reward, int | float)
            or not abs(reward) <= LARGEST
        ):
            raise AnswerError(f"whose reward {index} is not a finite number of fp32")
        else:
            rewards[index] = float(reward)  # torch takes no integers of more than 64 bits
    return rewards
