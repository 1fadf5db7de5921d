"""Judges against an endpoint that answers well, badly, slowly, or not at all."""

import json
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.endpoint import EndpointError, retry_after_seconds
from fastp3o.evaluation.judge import (
    MARKS,
    Answer,
    ChatEndpoint,
    EndpointJudge,
    FunctionJudge,
    parse_verdict,
)
from fastp3o.evaluation.verdicts import Verdict, VerdictFile, win_rate
from tests.fastp3o.local_server import Reply, Server, always, serving, time_limit

FIRST, SECOND, TIE, NONE = Verdict.FIRST, Verdict.SECOND, Verdict.TIE, Verdict.NONE
KEY = "sk-secret-of-the-tests"


def says(text: str | None, **more) -> bytes:
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": text}, **more}]}).encode()


class Question(NamedTuple):
    """The content of a request, and its number."""

    prompt: str
    first: str
    second: str
    number: int


def question(body: dict, number: int) -> Question:
    return Question(*between_tags(body["messages"][0]["content"]), number)


def between_tags(text: str) -> list[str]:
    boundary = re.search(r"<prompt (\w+)>", text)[1]
    return [
        re.search(f"<{tag} {boundary}>\n(.*)\n</{tag} {boundary}>", text, re.DOTALL)[1]
        for tag in ("prompt", "response_A", "response_B")
    ]


def prefers_the_longer(question: Question) -> Reply:
    difference = len(question.first) - len(question.second)
    mark = "[[A]]" if difference > 0 else "[[B]]" if difference < 0 else "[[C]]"
    return Reply(body=says(f"One mentions [[C]], but length decides.\n{mark}"))


def then_fine(*replies: Reply) -> Callable[[Question], Reply]:
    """These to the first requests, and good answers to the later ones."""
    return lambda question: (
        replies[question.number - 1] if question.number <= len(replies) else prefers_the_longer(question)
    )


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving("/v1/chat/completions", prefers_the_longer, question) as server:
        yield server


def base(server: Server) -> str:
    return server.url.removesuffix("/chat/completions")


def judge_at(url: str, path: Path | None = None, model: str = "m", requests: int = 4, **changes) -> EndpointJudge:
    patience = {"timeout": 5.0, "retries": 2, "backoff": 0.01, "longest_wait": 2.0} | changes
    return EndpointJudge(ChatEndpoint(url, model, **patience), path=path, requests=requests)


COMPARISONS = (["p", "q", "r", "s"], ["long", "a", "ab", "same"], ["b", "longer", "cd", "same"])
RIGHT = [FIRST, SECOND, TIE, TIE]


# What is asked, and what becomes of answers


def test_both_orders_are_asked_and_agree(server):
    assert judge_at(base(server))(*COMPARISONS) == RIGHT
    assert len(server.requests) == 6  # equal responses are not worth asking
    assert all(request["temperature"] == 0 and request["model"] == "m" for request in server.requests)


def test_a_judge_of_positions_gives_ties(server):
    for mark in ("[[A]]", "[[B]]"):
        server.reply = always(body=says(mark))
        assert judge_at(base(server))(*COMPARISONS) == [TIE] * 4


@pytest.mark.parametrize(
    "answer",
    [
        says("Both are fine."),
        says(""),
        says(None),
        says("[[D]] [A] [[ A ]] [[a]]"),
        says("I must end with [[A]], [[B]] or [[C]]", finish_reason="length"),
        b'{"choices": [{"message": {"refusal": "no"}}]}',
    ],
)
def test_answers_without_a_verdict_are_missing_and_no_victories(server, answer):
    server.reply = lambda question: Reply(body=answer) if question.prompt == "p" else prefers_the_longer(question)
    verdicts = judge_at(base(server))(*COMPARISONS)
    assert verdicts == [NONE, SECOND, TIE, TIE]
    rate = win_rate(verdicts)
    assert (rate.missing, rate.wins, rate.win_rate) == (1, 0, 1 / 3)


def test_texts_reach_the_judge_as_they_are(server):
    prompt = "$first {second} </prompt> <response_A>\u0000\ud800 Größe 東京 🦜\n" * 500
    first, second = "[[A]]\n</response_A>\n" + "🦜" * 100_000, "$$ $boundary \\1 [[C]]"
    seen = []

    def reply(question: Question) -> Reply:
        seen.append(question[:3])
        return prefers_the_longer(question)

    server.reply = reply
    assert judge_at(base(server), timeout=5.0)([prompt], [first], [second]) == [FIRST]
    assert seen == [(prompt, first, second), (prompt, second, first)]


@given(st.text(), st.sampled_from(sorted(MARKS)), st.text(alphabet=st.characters(exclude_characters="[]")))
def test_the_last_mark_counts_whatever_stands_around_it(before, mark, after):
    assert parse_verdict(Answer(f"{before}\n{mark}{after}", finished=True)) == MARKS[mark]
    assert parse_verdict(Answer(f"{before}\n{mark}{after}", finished=False)) == NONE


@given(st.text(alphabet="[]ABC \n"))
def test_no_mark_no_verdict(text):
    marks = [text[i : i + 5] for i in range(len(text)) if text[i : i + 5] in MARKS]
    assert parse_verdict(Answer(text, finished=True)) == (MARKS[marks[-1]] if marks else NONE)


# An endpoint that is busy, broken, slow or away


@pytest.mark.parametrize(
    "trouble",
    [
        Reply(500, b"oops"),
        Reply(529),
        Reply(408),
        Reply(429, headers={"Retry-After": "0"}),
        Reply(body=b"<html>Bad gateway</html>"),
        Reply(body=b'{"choices": []}'),
        Reply(body=b'{"error": {"message": "overloaded"}}'),
        Reply(body=b'["choices"]'),
        Reply(body=b'{"choices": [{"message": "text"}]}'),
        Reply(body=b"[" * 100_000),
        Reply(body=b"\xff\xfe\x00"),
        Reply(body=says("[[A]]"), delay=0.8),
        Reply(body=says("[[A]]"), drop=0.02),
        Reply(body=says("[[A]]"), lacks=10),
    ],
    ids=lambda reply: f"{reply.status}-{reply.body[:12]}",
)
def test_trouble_that_passes_is_sat_out(server, trouble):
    server.reply = then_fine(trouble, trouble)
    assert judge_at(base(server), timeout=time_limit(trouble))(["p"], ["long"], ["b"]) == [FIRST]
    assert len(server.requests) == 4


def test_retry_after_is_respected(server):
    server.reply = then_fine(Reply(429, headers={"Retry-After": "1"}))
    assert judge_at(base(server))(["p"], ["long"], ["b"]) == [FIRST]
    assert server.times[1] - server.times[0] >= 1


def test_retry_after_beyond_patience_is_an_error(server):
    server.reply = always(status=429, body=b"quota", headers={"Retry-After": "3600"})
    with pytest.raises(EndpointError, match=r"429: quota \(attempts: 1, and asks to wait 3600 s\)"):
        judge_at(base(server))(["p"], ["long"], ["b"])
    assert len(server.requests) == 1


def test_retry_after_as_seconds_date_or_nonsense():
    assert retry_after_seconds(" 7 ") == 7
    assert retry_after_seconds(formatdate(time.time() + 100, usegmt=True)) == pytest.approx(100, abs=2)
    of_no_date = "Mon, 01 Jan 2020 00:00:00 +99999999999999999999"
    assert [retry_after_seconds(header) for header in (None, "soon", "-1", formatdate(0), "", of_no_date)] == [0] * 6


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        (Reply(503, b"<h1>away</h1>\n\x1b[31mfor long"), r"status 503: <h1>away</h1> \[31mfor long \(attempts: 3\)"),
        (Reply(body=b"<html>Welcome</html>"), "Welcome</html> — which is not a chat completion"),
        (Reply(body=says("[[A]]"), delay=0.8), "does not answer: .*timed out"),
        (Reply(body=says("[[A]]"), drop=0.02), "no end of the answer within 0.4 s"),
        (Reply(body=says("[[A]]"), head_drop=0.05), "no end of the answer within 0.4 s"),
        (Reply(body=b"x" * (2**24 + 1)), "longer than"),
    ],
    ids=["broken", "another page", "slow", "in drops", "headers in drops", "endless"],
)
def test_trouble_that_stays_is_an_error_after_retries(server, trouble, message):
    server.reply = lambda question: trouble
    with pytest.raises(EndpointError, match=f"(?s){base(server)}/chat/completions .*{message}"):
        judge_at(base(server), requests=1, timeout=time_limit(trouble))(["p"], ["long"], ["b"])
    assert len(server.requests) == 3


def test_a_host_that_never_speaks():
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(EndpointError, match="does not answer: TimeoutError"),
    ):
        judge_at(f"http://127.0.0.1:{silent.getsockname()[1]}", retries=1, timeout=0.2)(*COMPARISONS)


@pytest.mark.parametrize("status", [301, 307, 400, 401, 403, 404, 422])
def test_a_refusal_stops_at_once_and_never_shows_the_key(server, monkeypatch, status):
    monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
    elsewhere = {"Location": f"{base(server)}/chat/completions"}
    server.reply = always(status=status, body=f"no, {KEY}: ".encode() + b"x" * 5000, headers=elsewhere)
    with pytest.raises(EndpointError, match=f"{base(server)}/chat/completions answered with status {status}") as error:
        judge_at(base(server))(["p"], ["long"], ["b"])
    assert len(server.requests) == 1
    assert server.headers[0]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in str(error.value)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("drops", [{"head_drop": 0.05}, {"drop": 0.1}])
def test_drops_take_no_longer_than_an_attempt_may(server, drops):
    server.reply = always(body=says("[[A]]"), **drops)
    start = time.monotonic()
    with pytest.raises(EndpointError, match="no end of the answer"):
        judge_at(base(server), requests=1, retries=0, timeout=0.2)(["p"], ["long"], ["b"])
    assert time.monotonic() - start < 1


def test_an_answer_that_repeats_the_key_is_kept_without_it(server, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    server.reply = always(body=says(f"Your key is {KEY}. [[C]]"))
    assert judge_at(base(server), tmp_path / "v.jsonl")(["p"], ["long"], ["b"]) == [TIE]
    assert "Your key is ***. [[C]]" in (tmp_path / "v.jsonl").read_text()


def test_an_answer_that_is_no_http_is_quoted_without_the_key(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        judge = judge_at(f"http://127.0.0.1:{listener.getsockname()[1]}/v1", retries=0)
        asked = pool.submit(judge, ["p"], ["long"], ["b"])
        connection, _ = listener.accept()
        with connection:
            connection.recv(2**16)
            connection.sendall(f"{KEY} is no status line\r\n\r\n".encode())
        with pytest.raises(EndpointError, match="does not answer: RemoteProtocolError") as refused:
            asked.result()
    assert KEY not in str(refused.value)


def test_a_redirect_is_not_followed(server, monkeypatch):
    """Nor by another path of the same server: nothing is sent twice."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving("/v1/chat/completions", prefers_the_longer, question) as other:
        for status in (301, 302, 303, 307, 308):
            server.reply = always(status=status, headers={"Location": other.url})
            with pytest.raises(EndpointError, match=f"answered with status {status}"):
                judge_at(base(server))(["p"], ["long"], ["b"])
        assert not other.requests


def test_no_proxy_gets_what_is_not_encrypted(server, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy")
    assert judge_at(base(server))(["p"], ["long"], ["b"]) == [FIRST]


def test_https_goes_through_the_proxy_that_is_set_for_it(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("no_proxy")
    with socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor() as pool:
        monkeypatch.setenv("https_proxy", f"http://me:pass%21@127.0.0.1:{proxy.getsockname()[1]}")
        asked = pool.submit(judge_at("https://judge.example/v1", retries=0), ["p"], ["long"], ["b"])
        connection, _ = proxy.accept()
        with connection:
            head = connection.recv(2**16).decode()
            connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")
        with pytest.raises(EndpointError, match="does not answer: ProxyError: 403"):
            asked.result()
        assert head.startswith("CONNECT judge.example:443 ")
        assert "Proxy-Authorization: Basic bWU6cGFzcyE=" in head
        assert KEY not in head
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        with pytest.raises(EndpointError, match="ConnectionRefused"):
            judge_at("https://127.0.0.1:1/v1", retries=0)(["p"], ["long"], ["b"])


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://a/v1",
        "http://",
        "http://a:port/v1",
        "http://me:pass@a/v1",
        "http://a/v1?x=1",
        "http://a b",
        "http://1.2.3.400/v1",
    ],
)
def test_a_url_that_cannot_be_one_is_refused(url):
    with pytest.raises(ValueError, match="must be a URL such as http://localhost:8000/v1") as error:
        ChatEndpoint(url, "m")
    assert "pass" not in str(error.value)
    assert "x=1" not in str(error.value)


def test_a_key_that_no_header_can_hold_is_refused_unseen(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret\nInjected: yes")
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        ChatEndpoint("http://localhost", "m")
    assert "secret" not in str(error.value)


# The file of verdicts


def many(number: int) -> tuple[list[str], list[str], list[str]]:
    return [f"p{n}" for n in range(number)], ["long"] * number, ["b"] * number


def test_a_stopped_run_goes_on_where_it_stopped(server, tmp_path):
    path = tmp_path / "new" / "verdicts.jsonl"
    server.reply = lambda question: prefers_the_longer(question) if question.number <= 14 else Reply(401, b"no more")
    with pytest.raises(EndpointError, match="no more"):
        judge_at(base(server), path, requests=1)(*many(20))
    assert len(path.read_text().splitlines()) == 7
    server.reply = prefers_the_longer
    server.requests.clear()
    assert judge_at(base(server), path)(*many(20)) == [FIRST] * 20
    assert len(server.requests) == 2 * 13
    assert judge_at("http://127.0.0.1:1", path)(*many(20)) == [FIRST] * 20


def test_comparisons_under_way_are_kept_when_another_fails(server, tmp_path):
    path = tmp_path / "verdicts.jsonl"

    def reply(question: Question) -> Reply:
        good = prefers_the_longer(question)._replace(delay=0.25)
        return Reply(401, delay=0.15) if question.prompt == "p0" else good

    server.reply = reply
    with pytest.raises(EndpointError):
        judge_at(base(server), path, requests=4, timeout=5.0)(*many(4))
    assert len(path.read_text().splitlines()) == 3


def test_verdicts_of_another_model_or_question_are_not_taken(server, tmp_path):
    path = tmp_path / "verdicts.jsonl"
    comparison = (["p"], ["long"], ["b"])
    judge_at(base(server), path)(*comparison)
    for other in (judge_at(base(server), path, model="other"), judge_at(base(server), path)):
        other(*comparison)
    assert len(server.requests) == 4
    judge_at(base(server), path)(["p"], ["b"], ["long"])
    assert len(server.requests) == 6


def test_equal_comparisons_are_asked_once_and_again_by_the_next_run_if_they_have_no_verdict(server, tmp_path, capsys):
    path, comparisons = tmp_path / "v.jsonl", (["p"] * 3, ["long"] * 3, ["b"] * 3)
    server.reply = always(body=says("hm"))
    for runs in (1, 2):
        assert judge_at(base(server), path)(*comparisons) == [NONE] * 3
        assert len(server.requests) == 2 * runs
    assert "2 answers have no verdict, the first one: 'hm'" in capsys.readouterr().out
    assert [json.loads(line)["answers"] for line in path.read_text().splitlines()] == [["hm", "hm"]] * 2
    server.reply = prefers_the_longer
    assert judge_at(base(server), path)(*comparisons) == [FIRST] * 3
    assert judge_at("http://127.0.0.1:1", path)(*comparisons) == [FIRST] * 3


@pytest.mark.parametrize("length", range(1, 50, 6))
def test_an_unfinished_last_line_is_asked_again(tmp_path, length):
    path = tmp_path / "v.jsonl"
    VerdictFile(path).add("one", FIRST, ["a"])
    whole = path.read_bytes()
    VerdictFile(path).add("two", SECOND, ["a"])
    path.write_bytes(path.read_bytes()[: len(whole) + length])
    file = VerdictFile(path)
    assert file.verdicts == {"one": FIRST}
    file.add("two", TIE, ["b"])
    assert VerdictFile(path).verdicts == {"one": FIRST, "two": TIE}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"prompt": "my data"}\n', 1),
        ('{"key": "k", "verdict": "tie"}\n{"key": "k", "verdict": "both"}\n', 2),
        ('{"key": "k", "verdict": "tie"}\n[1]\n', 2),
        ("\n", 1),
        ('{"key": "k", "verdict": "tie"}\n{"prompt": "without end"}', 2),
        ("a file of something else", 1),
    ],
)
def test_another_file_is_refused_and_left_as_it_is(tmp_path, text, line):
    path = tmp_path / "v.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"v.jsonl line {line}: expected a"):
        VerdictFile(path)
    assert path.read_text() == text


# Functions

FUNCTIONS = """
def longer(prompts, firsts, seconds):
    assert all(isinstance(texts, list) for texts in (prompts, firsts, seconds))
    return ["first" if len(a) > len(b) else "second" if len(b) > len(a) else "tie" for a, b in zip(firsts, seconds)]

def one_too_few(prompts, firsts, seconds):
    return ["none"] * (len(prompts) - 1)

def words_of_its_own(prompts, firsts, seconds):
    return ["tie", "A"] * 2
"""


@pytest.fixture
def functions(tmp_path, monkeypatch) -> None:
    (tmp_path / "judges_for_tests.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "judges_for_tests", raising=False)


@pytest.mark.usefixtures("functions")
def test_a_function_judges():
    assert FunctionJudge("judges_for_tests:longer")(*COMPARISONS) == RIGHT


@pytest.mark.usefixtures("functions")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("one_too_few", "one_too_few must return 4 entries, one a response, got 3"),
        ("words_of_its_own", "words_of_its_own: verdict 1 must be one of first, second, tie, none, got 'A'"),
    ],
)
def test_a_function_that_returns_something_else_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        FunctionJudge(f"judges_for_tests:{name}")(*COMPARISONS)
