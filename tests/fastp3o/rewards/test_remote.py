"""Rewards from a URL: what is posted to it, and what it must answer."""

import json
import time

import pytest
import torch

from fastp3o.calls.endpoint import AnswerError, EndpointError
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rewards.remote import RemoteReward, read_rewards
from tests.fastp3o.groups import groups_of_texts
from tests.fastp3o.local_server import Reply, always


def rewards(values: list) -> bytes:
    return json.dumps({"rewards": values}).encode()


def lengths(body: dict) -> Reply:
    return Reply(body=rewards(list(map(len, body["responses"]))))


SERVED = "/score", lengths, lambda body, number: body


class EndpointConfig(RemoteConfig):
    scorers = ("http://endpoint",)


def reward_at(url: str, **settings) -> RemoteReward:
    return RemoteReward(
        url, EndpointConfig(**({"reward_timeout": 5.0, "reward_retries": 2} | settings))
    )


GROUPS = groups_of_texts(["a", "bb"], ["ccc", "dddd"], ["", "ffffff"], answer=[1, "two", [3]])
RIGHT = [[1, 2], [3, 4], [0, 6]]


def test_responses_are_scored_beside_their_prompts_and_columns(server, monkeypatch):
    monkeypatch.setenv("REWARD_API_KEY", "sk-secret-of-the-tests")
    scores = reward_at(server.url, reward_columns="answer")(GROUPS)
    assert scores.tolist() == RIGHT
    assert scores.dtype == torch.float32
    assert server.requests == [
        {
            "prompts": [f"prompt {number}" for number in (0, 0, 1, 1, 2, 2)],
            "responses": ["a", "bb", "ccc", "dddd", "", "ffffff"],
            "answer": [1, 1, "two", "two", [3], [3]],
        }
    ]
    assert server.headers[0]["Authorization"] == "Bearer sk-secret-of-the-tests"
    texts = ["\u0000\ud800 Größe 東京 🦜", '{"rewards": [9]}', "\n" * 1000]
    assert reward_at(server.url)(groups_of_texts(texts)).tolist() == [list(map(len, texts))]
    assert server.requests[-1] == {"prompts": ["prompt 0"] * 3, "responses": texts}
    server.reply = always(body=rewards([1.0] * 5))
    with pytest.raises(
        EndpointError, match=r"status 200: .* — which has 5 rewards, for 6 responses"
    ):
        reward_at(server.url)(GROUPS)


def test_integers_of_more_than_64_bits_are_rewards():
    assert read_rewards(rewards([10**30, -(2**64), 1]), 3) == [1e30, -(2.0**64), 1.0]
    for body in (rewards([10**400]), b'{"rewards": [' + b"9" * 5000 + b"]}"):
        with pytest.raises(ValueError, match=r"fp32|JSON"):
            read_rewards(body, 1)


def test_batches_are_scored_at_once(server):
    server.reply = lambda body: lengths(body)._replace(delay=0.2)
    start = time.monotonic()
    reward = reward_at(server.url, reward_batch_size=1, reward_requests=6, reward_timeout=2.0)
    assert reward(GROUPS).tolist() == RIGHT
    assert time.monotonic() - start < 0.8
    assert [len(body["responses"]) for body in server.requests] == [2] * 3


@pytest.mark.parametrize(
    ("size", "asked"), [(1, [2, 2, 2]), (3, [2, 2, 2]), (5, [4, 2]), (16, [6])]
)
def test_a_prompts_responses_are_never_cut_between_requests(server, size, asked):
    assert (
        reward_at(server.url, reward_batch_size=size, reward_requests=1)(GROUPS).tolist() == RIGHT
    )
    assert [len(body["responses"]) for body in server.requests] == asked
    for body in server.requests:
        assert all(body["prompts"].count(prompt) == 2 for prompt in body["prompts"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rewards([1, float("nan"), 1, 1, 1, 1]), "whose reward 1 is not a finite number"),
        (rewards([-1e39] + [1] * 5), "whose reward 0 is not a finite number of fp32"),
        (rewards([1] * 5 + ["1"]), "whose reward 5 is not a finite number"),
        (rewards([True] * 6), "whose reward 0 is not a finite number"),
        (b'{"rewards": 1}', "which is not an object with a list of `rewards`"),
        (b"[1, 1, 1, 1, 1, 1]", "which is not an object with a list of `rewards`"),
        (b"[" * 100_000, "which is not JSON"),
    ],
)
def test_only_one_finite_number_a_response_is_taken(body, said):
    with pytest.raises(ValueError, match=said) as refused:
        read_rewards(body, 6)
    assert isinstance(refused.value, AnswerError) == ("JSON" not in said)
