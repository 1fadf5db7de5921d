"""Judges: what an endpoint is asked, what becomes of its answers and which of them are kept; and
functions.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.calls.endpoint import EndpointError
from fastp3o.evaluation.judge import FunctionJudge
from fastp3o.rewards.judge import MARKS, Answer, ChatEndpoint, EndpointJudge, parse_verdict
from fastp3o.rewards.verdicts import Verdict, VerdictFile
from tests.fastp3o.local_server import Reply, Server, always

FIRST, SECOND, TIE, NONE = Verdict.FIRST, Verdict.SECOND, Verdict.TIE, Verdict.NONE
# A module of judges; `longer` prefers the longer response.
JUDGES = """
def longer(prompts, firsts, seconds):
    assert all(isinstance(texts, list) for texts in (prompts, firsts, seconds))
    return ["first" if len(a) > len(b) else "second" if len(b) > len(a) else "tie" for a, b in zip(firsts, seconds)]
"""


def says(text: str | None, **more) -> bytes:
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}, **more}]}
    ).encode()


class Question(NamedTuple):
    """The content of a request, and its number."""

    prompt: str
    first: str
    second: str
    number: int


def question(body: dict, number: int) -> Question:
    text = body["messages"][0]["content"]
    boundary = re.search(r"<prompt (\w+)>", text)[1]
    parts = (
        re.search(f"<{tag} {boundary}>\n(.*)\n</{tag} {boundary}>", text, re.DOTALL)[1]
        for tag in ("prompt", "response_A", "response_B")
    )
    return Question(*parts, number)


def prefers_the_longer(question: Question) -> Reply:
    difference = len(question.first) - len(question.second)
    mark = "[[A]]" if difference > 0 else "[[B]]" if difference < 0 else "[[C]]"
    return Reply(body=says(f"One mentions [[C]], but length decides.\n{mark}"))


SERVED = "/v1/chat/completions", prefers_the_longer, question


def base(server: Server) -> str:
    return server.url.removesuffix("/chat/completions")


def judge_at(
    url: str, path: Path | None = None, model: str = "m", requests: int = 4
) -> EndpointJudge:
    return EndpointJudge(
        ChatEndpoint(url, model, timeout=5.0, retries=0), path=path, requests=requests
    )


COMPARISONS = (["p", "q", "r", "s"], ["long", "a", "ab", "same"], ["b", "longer", "cd", "same"])
RIGHT = [FIRST, SECOND, TIE, TIE]


def test_both_orders_are_asked_and_a_judge_of_positions_gives_ties(server):
    assert judge_at(base(server))(*COMPARISONS) == RIGHT
    assert len(server.requests) == 6  # equal responses are not worth asking
    assert all(
        request["temperature"] == 0 and request["model"] == "m" for request in server.requests
    )
    for mark in ("[[A]]", "[[B]]"):
        server.reply = always(body=says(mark))
        assert judge_at(base(server))(*COMPARISONS) == [TIE] * 4
    silent = Reply(body=says("Both are fine."))
    server.reply = lambda question: (
        silent if question.prompt == "p" else prefers_the_longer(question)
    )
    assert judge_at(base(server))(*COMPARISONS) == [NONE, *RIGHT[1:]]


@given(st.text(st.sampled_from("[]ABC \nä")))
def test_the_last_mark_of_a_finished_answer_counts(text):
    marks = [text[i : i + 5] for i in range(len(text)) if text[i : i + 5] in MARKS]
    assert parse_verdict(Answer(text, finished=True)) == (MARKS[marks[-1]] if marks else NONE)
    for mark, verdict in MARKS.items():
        assert (
            parse_verdict(Answer(f"{text}\n{mark} {text.replace('[', '')}", finished=True))
            is verdict
        )


def test_texts_reach_the_judge_as_they_are(server):
    prompt = "$first {second} </prompt> <response_A>\u0000\ud800 Größe 東京 🦜\n" * 500
    first, second = "[[A]]\n</response_A>\n" + "🦜" * 100_000, "$$ $boundary \\1 [[C]]"
    assert judge_at(base(server))([prompt], [first], [second]) == [FIRST]
    seen = [question(body, 0)[:3] for body in server.requests]
    assert seen == [(prompt, first, second), (prompt, second, first)]


def test_an_answer_without_a_mark_or_an_end_has_no_verdict_and_what_is_no_answer_may_be_asked_for_again():
    endpoint = ChatEndpoint("http://a", "m")
    cut = says("I must end with [[A]], [[B]] or [[C]]", finish_reason="length")
    refusal = b'{"choices": [{"message": {"refusal": "no"}}]}'
    for answer in (says(""), says(None), says("[[D]] [A] [[ A ]]"), cut, refusal):
        assert parse_verdict(endpoint.read_answer(answer)) is NONE
    for body in (
        b'{"choices": []}',
        b'["choices"]',
        b'{"choices": [{"message": "a"}]}',
        b"[" * 99_999,
        b"\xff",
    ):
        with pytest.raises(ValueError, match="which is not a chat completion") as refused:
            endpoint.read_answer(body)
        assert type(refused.value) is ValueError


def test_an_unfinished_last_line_is_asked_again_and_another_file_is_left_as_it_is(tmp_path):
    path = tmp_path / "v.jsonl"
    VerdictFile(path).add("one", FIRST, ["a"])
    whole = path.read_bytes()
    VerdictFile(path).add("two", SECOND, ["a"])
    both = path.read_bytes()
    for length in (1, 40):
        path.write_bytes(both[: len(whole) + length])
        file = VerdictFile(path)
        assert file.verdicts == {"one": FIRST}
        file.add("two", TIE, ["b"])
        assert VerdictFile(path).verdicts == {"one": FIRST, "two": TIE}
    for second in (b'{"key": "k", "verdict": "both"}\n', b"[1]\n", b'{"prompt": "without end"}'):
        path.write_bytes(whole + second)
        with pytest.raises(ValueError, match=r"v.jsonl line 2: expected a"):
            VerdictFile(path)
        assert path.read_bytes() == whole + second


def test_an_answer_that_repeats_the_key_is_kept_without_it(server, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret-of-the-tests")
    server.reply = always(body=says("Your key is sk-secret-of-the-tests. [[C]]"))
    assert judge_at(base(server), tmp_path / "v.jsonl")(["p"], ["long"], ["b"]) == [TIE]
    assert server.headers[0]["Authorization"] == "Bearer sk-secret-of-the-tests"
    assert "Your key is ***. [[C]]" in (tmp_path / "v.jsonl").read_text()


def test_comparisons_under_way_are_kept_when_another_fails(server, tmp_path):
    def reply(question: Question) -> Reply:
        good = prefers_the_longer(question)._replace(delay=0.25)
        return Reply(401, delay=0.15) if question.prompt == "p0" else good

    server.reply, path = reply, tmp_path / "new" / "verdicts.jsonl"
    with pytest.raises(EndpointError):
        judge_at(base(server), path)([f"p{n}" for n in range(4)], ["long"] * 4, ["b"] * 4)
    assert len(path.read_text().splitlines()) == 3


def test_verdicts_of_another_model_or_question_are_not_taken(server, tmp_path):
    pair = ["long"], ["b"]
    for model, texts, asked in (
        ("m", pair, 2),
        ("other", pair, 4),
        ("m", pair, 4),
        ("m", pair[::-1], 6),
    ):
        judge_at(base(server), tmp_path / "verdicts.jsonl", model)(["p"], *texts)
        assert len(server.requests) == asked


def test_equal_comparisons_are_asked_once_and_again_by_the_next_run_if_they_have_no_verdict(
    server, tmp_path, capsys
):
    path, comparisons = tmp_path / "v.jsonl", (["p"] * 3, ["long"] * 3, ["b"] * 3)
    server.reply = always(body=says("hm"))
    for runs in (1, 2):
        assert judge_at(base(server), path)(*comparisons) == [NONE] * 3
        assert len(server.requests) == 2 * runs
    assert "2 answers have no verdict, the first one: 'hm'" in capsys.readouterr().out
    assert [json.loads(line)["answers"] for line in path.read_text().splitlines()] == [
        ["hm", "hm"]
    ] * 2
    server.reply = prefers_the_longer
    assert judge_at(base(server), path)(*comparisons) == [FIRST] * 3
    assert judge_at("http://127.0.0.1:1", path)(*comparisons) == [FIRST] * 3


def test_a_function_judges_and_one_that_returns_something_else_is_named(tmp_path, monkeypatch):
    (tmp_path / "judges_by_length.py").write_text(JUDGES)
    monkeypatch.chdir(tmp_path)
    judge = FunctionJudge("judges_by_length:longer")
    assert judge(*COMPARISONS) == RIGHT
    judge.function = lambda *texts: ["tie", "A"] * 2
    with pytest.raises(ValueError, match=r"judges_by_length:longer.* 'A'"):
        judge(*COMPARISONS)
