"""Rewards from a URL that answers well, badly, late and not at all."""

import asyncio
import json
import re
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from fastp3o.endpoint import Endpoint, EndpointError
from fastp3o.rewards.config import RemoteConfig
from fastp3o.rewards.remote import RemoteReward
from tests.fastp3o.groups import groups_of_texts
from tests.fastp3o.local_server import Handler, Reply, Server, always, serving, time_limit


class Question(NamedTuple):
    body: dict
    number: int


def rewards(values: list) -> bytes:
    return json.dumps({"rewards": values}).encode()


def lengths(question: Question) -> Reply:
    return Reply(body=rewards([len(response) for response in question.body["responses"]]))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("REWARD_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving("/score", lengths, Question) as server:
        yield server


class EndpointConfig(RemoteConfig):
    scorers = ("http://endpoint",)


def reward_at(url: str, **settings) -> RemoteReward:
    reward = RemoteReward(url, EndpointConfig(**({"reward_timeout": 5.0, "reward_retries": 2} | settings)))
    reward.endpoint.backoff = 0.01
    return reward


GROUPS = groups_of_texts(["a", "bb"], ["ccc", "dddd"], ["", "ffffff"], answer=[1, "two", [3]])
RIGHT = [[1, 2], [3, 4], [0, 6]]


def test_responses_are_scored_beside_their_prompts_and_columns(server):
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
    reward_at(server.url)(GROUPS)
    assert server.requests[-1].keys() == {"prompts", "responses"}


def test_batches_are_scored_at_once(server):
    server.reply = lambda question: lengths(question)._replace(delay=0.2)
    start = time.monotonic()
    reward = reward_at(server.url, reward_batch_size=1, reward_requests=6, reward_timeout=2.0)
    assert reward(GROUPS).tolist() == RIGHT
    assert time.monotonic() - start < 0.8
    assert len(server.requests) == 6


def test_texts_of_any_kind_arrive(server):
    texts = ["\u0000\ud800 Größe 東京 🦜", '{"rewards": [9]}', "\n" * 1000]
    assert reward_at(server.url)(groups_of_texts(texts)).tolist() == [list(map(len, texts))]
    assert server.requests[0]["responses"] == texts


def test_requests_share_a_connection_and_keep_no_cookie(server, monkeypatch):
    monkeypatch.setattr(Handler, "protocol_version", "HTTP/1.1")
    server.reply = lambda question: lengths(question)._replace(headers={"Set-Cookie": "a=b"})
    for _ in range(3):
        reward_at(server.url)(GROUPS)
    assert len(server.clients) == 1
    assert not any("Cookie" in headers for headers in server.headers)


def test_a_running_event_loop_is_no_obstacle(server):
    """As in a notebook."""

    async def notebook() -> None:
        assert reward_at(server.url)(GROUPS).tolist() == RIGHT
        Endpoint(server.url, "KEY", retries=0).get(bytes.decode)

    with pytest.raises(EndpointError, match="answered with status 501"):  # the server knows no GET
        asyncio.run(notebook())


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (Reply(500, b"out of memory"), r"answered with status 500: out of memory \(attempts: 3\)"),
        (Reply(body=b"<html>Welcome</html>"), r"Welcome</html> — which is not JSON \(attempts: 3\)"),
        (Reply(body=b"[" * 100_000), r"which is not JSON \(attempts: 3\)"),
        (Reply(body=rewards([1] * 6), delay=0.8), r"does not answer: TimeoutError: .* \(attempts: 3\)"),
        (Reply(body=rewards([1] * 6), drop=0.05), r"no end of the answer within 0.4 s \(attempts: 3\)"),
    ],
    ids=["broken", "another page", "nested", "late", "in drops"],
)
def test_trouble_that_stays_is_named_after_all_attempts(server, trouble, said):
    server.reply = lambda question: trouble
    with pytest.raises(EndpointError, match=f"(?s){server.url} .*{said}"):
        reward_at(server.url, reward_timeout=time_limit(trouble))(GROUPS)
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (rewards([1.0] * 5), "which has 5 rewards, for 6 responses"),
        (rewards([1.0] * 7), "which has 7 rewards, for 6 responses"),
        (rewards([1, float("nan"), 1, 1, 1, 1]), "whose reward 1 is not a finite number"),
        (rewards([float("inf")] + [1] * 5), "whose reward 0 is not a finite number"),
        (rewards([1e39] + [1] * 5), "whose reward 0 is not a finite number of fp32"),
        (rewards([10**400] + [1] * 5), "whose reward 0 is not a finite number of fp32"),
        (rewards([1] * 5 + ["1"]), "whose reward 5 is not a finite number"),
        (rewards([1] * 5 + [None]), "whose reward 5 is not a finite number"),
        (rewards([True] * 6), "whose reward 0 is not a finite number"),
        (rewards([[1]] * 6), "whose reward 0 is not a finite number"),
        (b'{"scores": [1, 1, 1, 1, 1, 1]}', "which is not an object with a list of `rewards`"),
        (b'{"rewards": 1}', "which is not an object with a list of `rewards`"),
        (b"[1, 1, 1, 1, 1, 1]", "which is not an object with a list of `rewards`"),
    ],
)
def test_an_answer_of_another_form_stops_at_once(server, body, said):
    server.reply = always(body=body)
    with pytest.raises(EndpointError, match=f"{server.url} answered with status 200: .* — {said}"):
        reward_at(server.url)(GROUPS)
    assert len(server.requests) == 1


def test_a_connection_that_opens_after_the_time_limit_is_not_used(server, monkeypatch):
    find_address = socket.getaddrinfo

    def find_late(*arguments, **options):
        time.sleep(0.4)
        return find_address(*arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", find_late)
    with pytest.raises(EndpointError, match=r"no end of the answer within 0.2 s \(attempts: 1\)"):
        reward_at(server.url.replace("127.0.0.1", "localhost"), reward_retries=0, reward_timeout=0.2)(GROUPS)
    assert not server.requests


@pytest.mark.parametrize("proxy", ["http://me:pass@proxy:port", "proxy:0", "http://a..b:80", "http://[", "http://:80"])
def test_a_proxy_that_cannot_be_one_is_refused_without_its_password(monkeypatch, proxy):
    monkeypatch.setenv("https_proxy", proxy)
    shown = re.escape(repr(proxy.removeprefix("http://me:pass@")))
    with pytest.raises(ValueError, match=f"the environment's proxy for https must be a URL such as .*, got {shown}"):
        reward_at("https://host/score")
