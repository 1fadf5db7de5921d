"""An endpoint, of a reward or of a judge, that answers well, badly, slowly, or not at all."""

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from math import inf

import pytest

from fastp3o.calls.answers import Answers
from fastp3o.calls.endpoint import AnswerError, Endpoint, EndpointError, client, seconds_asked
from tests.fastp3o.counted import instructions
from tests.fastp3o.local_server import Reply, always, time_limit

VARIABLE, KEY = "KEY_OF_TESTS", "sk-secret-of-the-tests"
FINE = Reply(body=b"3")
SERVED = "/answer", lambda number: FINE, lambda body, number: number


def read(answer: bytes) -> int:
    number = json.loads(answer)
    if number < 0:
        raise AnswerError("which is below 0")
    return number


def ask(url: str, **patience) -> int:
    patience = {"timeout": 5.0, "retries": 2, "backoff": 0.01, "longest_wait": 2.0} | patience
    return Endpoint(url, VARIABLE, **patience).post({"question": "?"}, read, threading.Event())


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        (
            Reply(500, b"<h1>away</h1>\n\x1b[31mfor long"),
            r"answered with status 500: <h1>away</h1> \[31mfor long",
        ),
        (Reply(408), r"answered with status 408: \(nothing\)"),
        (Reply(429, headers={"Retry-After": "0"}), r"answered with status 429: \(nothing\)"),
        (Reply(body=b"<html>Welcome</html>"), "answered with status 200: <html>Welcome</html> — "),
        (Reply(body=b"[" * 100_000), r"answered with status 200: \[{300}… — "),
        (
            Reply(body=b"3", delay=0.8),
            "does not answer: TimeoutError: timed out, no end of the answer within 0.4 s",
        ),
        (Reply(body=b"3" * 30, drop=0.02), "no end of the answer within 0.4 s"),
        (Reply(body=b"3", head_drop=0.05), "no end of the answer within 0.4 s"),
        (Reply(body=b"3", lacks=10), "does not answer: RemoteProtocolError"),
    ],
    ids=["broken", "slow", "busy", "other page", "nested", "late", "drops", "dropped head", "cut"],
)
def test_trouble_is_sat_out_if_it_passes_and_named_after_all_attempts_if_it_stays(
    server, trouble, said
):
    server.reply = lambda number: trouble if number == 1 else FINE
    assert ask(server.url, timeout=time_limit(trouble)) == 3
    assert len(server.requests) == 2
    server.reply = lambda number: trouble
    with pytest.raises(EndpointError, match=rf"(?s){server.url} .*{said}.* \(attempts: 2\)"):
        ask(server.url, retries=1, timeout=time_limit(trouble))
    assert len(server.requests) == 4


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404])
def test_a_refusal_stops_at_once_goes_nowhere_else_and_never_shows_the_key(
    server, monkeypatch, status
):
    monkeypatch.setenv(VARIABLE, KEY + "\n")
    server.reply = always(
        status=status, body=f"no, {KEY}: ".encode() + b"x" * 5000, headers={"Location": server.url}
    )
    with pytest.raises(
        EndpointError, match=f"{server.url} answered with status {status}: no"
    ) as refused:
        ask(server.url)
    assert len(server.requests) == 1
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(refused.value)
    assert len(str(refused.value)) < 500
    server.reply = always(body=b"-1")  # of another form
    with pytest.raises(EndpointError, match="answered with status 200: -1 — which is below 0"):
        ask(server.url)
    assert len(server.requests) == 2


def test_retry_after_is_respected_up_to_the_longest_wait(server):
    server.reply = lambda number: (
        Reply(429, headers={"Retry-After": ["1", "soon"][number - 1]}) if number < 3 else FINE
    )
    assert ask(server.url) == 3
    assert server.times[1] - server.times[0] >= 1 > server.times[2] - server.times[1]
    server.reply = always(status=429, body=b"quota", headers={"Retry-After": "3600"})
    with pytest.raises(EndpointError, match=r"429: quota \(attempts: 1, and asks to wait 3600 s\)"):
        ask(server.url)


def test_a_date_is_waited_for_by_the_servers_clock():
    date = "Fri, 31 Dec 1999 23:59:59 GMT"
    assert seconds_asked({"Retry-After": date, "Date": "Fri, 31 Dec 1999 23:58:00 GMT"}) == 119
    assert (
        seconds_asked({"Retry-After": date}) == seconds_asked({"Retry-After": "Fri, 99 Dec"}) == 0
    )
    later = format_datetime(datetime.now(UTC) + timedelta(minutes=1), usegmt=True)
    assert 50 < seconds_asked({"Retry-After": later, "Date": "soon"}) <= 60
    assert seconds_asked({"Retry-After": "9" * 5000}) == inf


def test_an_answer_does_not_look_at_all_that_are_awaited():
    def work(questions: int) -> int:
        taken = threading.Semaphore()

        def ask(question: int, stopped: threading.Event) -> int:
            taken.acquire()  # one after the other
            return question

        def take_all() -> None:
            answers = []
            for answer in Answers(ask, range(questions), 2):
                answers.append(answer)
                taken.release()
            assert sorted(answers) == [*range(questions)]

        return instructions(take_all)

    assert work(256) <= 6 * work(64)


def test_a_running_event_loop_as_in_a_notebook_is_no_obstacle(server):
    async def notebook() -> None:
        assert ask(server.url) == 3
        assert Endpoint(server.url, VARIABLE, retries=0).get(bytes.decode) == "3"
        assert server.requests[-1] is None  # GET has no body

    asyncio.run(notebook())


def test_an_answer_that_is_no_http_is_quoted_without_the_key(monkeypatch):
    monkeypatch.setenv(VARIABLE, KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, f"http://127.0.0.1:{listener.getsockname()[1]}", retries=0)
        connection, _ = listener.accept()
        with connection:
            connection.recv(2**16)
            connection.sendall(f"{KEY} is no status line\r\n\r\n".encode())
        with pytest.raises(EndpointError, match="does not answer: RemoteProtocolError") as refused:
            asked.result()
    assert KEY not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "localhost:80",
        "ftp://a",
        "http://a:port",
        "http://me:pass@a",
        "http://a?x=1",
        "http://a b",
        "http://1.2.3.400",
    ],
)
def test_a_url_that_cannot_be_one_is_refused_without_its_secrets(url):
    with pytest.raises(
        ValueError, match="must be a URL such as http://localhost:8000/v1"
    ) as refused:
        Endpoint(url, VARIABLE)
    assert "pass" not in str(refused.value)
    assert "x=1" not in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        (
            "https_proxy",
            "http://me:secret@proxy:port",
            "the environment's proxy for https cannot be used: Invalid port",
        ),
        (
            "https_proxy",
            "gopher://me:secret@proxy",
            "proxy for https cannot be used: Unknown scheme",
        ),
        (VARIABLE, "sk-secret\nInjected: yes", VARIABLE),
    ],
)
def test_a_proxy_or_a_key_that_cannot_be_one_is_refused_unseen(monkeypatch, variable, value, said):
    client.cache_clear()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=said) as refused:
        Endpoint("https://host/score", VARIABLE)
    assert "secret" not in str(refused.value)
