"""What an endpoint says responses are worth."""

import hashlib
import json
import threading
from collections.abc import Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from fastp3o.data.loading import column_values
from fastp3o.endpoint import AnswerError, Endpoint, at_once
from fastp3o.rewards.config import TEXTS, RemoteConfig
from fastp3o.rollouts.rollouts import Rollouts

# Rewards of the newest responses; each takes some 150 bytes.
REMEMBERED = 2**18

LARGEST = torch.finfo(torch.float32).max

# A prompt, its response, and the values of the columns.
Text = tuple


class RemoteReward:
    """A URL to which prompts, responses and columns of the data are posted, and which answers with rewards.

    Equal responses to equal prompts are asked for once. A key in the environment variable REWARD_API_KEY is sent along.

    Raises ValueError on a URL that cannot be one.
    """

    def __init__(self, url: str, config: RemoteConfig):
        self.endpoint = Endpoint(url, "REWARD_API_KEY", timeout=config.reward_timeout, retries=config.reward_retries)
        self.fields = (*TEXTS, *config.columns)
        self.requests, self.batch_size = config.reward_requests, config.reward_batch_size
        self.known: dict[bytes, float] = {}

    def __call__(self, rollouts: Rollouts) -> Tensor:
        """[P, K] fp32, finite. Raises EndpointError where the endpoint refuses, or all attempts of a request fail."""
        columns = [rollouts.beside_responses(rollouts.columns[name]) for name in self.fields[len(TEXTS) :]]
        texts = list(zip(*rollouts.texts(), *columns, strict=True))
        keys = [hashlib.sha256(json.dumps(text).encode()).digest() for text in texts]
        unknown = list({key: text for key, text in zip(keys, texts, strict=True) if key not in self.known}.items())
        batches = [unknown[start : start + self.batch_size] for start in range(0, len(unknown), self.batch_size)]
        for answered in at_once(self.ask, batches, self.requests):
            self.known |= answered
        rewards = torch.tensor([self.known[key] for key in keys], dtype=torch.float32)
        for key in list(islice(self.known, max(0, len(self.known) - REMEMBERED))):
            del self.known[key]
        return rewards.view(len(rollouts), -1)

    def ask(self, batch: Sequence[tuple[bytes, Text]], stopped: threading.Event) -> dict[bytes, float]:
        keys, texts = zip(*batch, strict=True)
        body = dict(zip(self.fields, zip(*texts, strict=True), strict=True))
        rewards = self.endpoint.post(body, lambda answer: read_rewards(answer, len(texts)), stopped)
        return dict(zip(keys, rewards, strict=True))

    def check(self, example: Mapping[str, list]) -> None:
        """Has an empty response to a prompt scored. example: a batch of one. Raises as a call does."""
        columns = column_values(example)
        self(Rollouts(example["prompt"], example["prompt_ids"], [[""]], [[[]]], [[False]], columns=columns))


def read_rewards(answer: bytes, count: int) -> list[float]:
    """Raises AnswerError where it holds anything but so many finite numbers, ValueError where it is not JSON."""
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
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not fits(reward):
            raise AnswerError(f"whose reward {index} is not a finite number of fp32")
    return rewards


def fits(number: float) -> bool:
    """Whether fp32 can hold it; NaN compares with nothing."""
    return abs(number) <= LARGEST
