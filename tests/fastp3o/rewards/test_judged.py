"""Language models that compare responses: what is kept of an endpoint's answers, and a model on
this machine.
"""

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o import UserError, train
from fastp3o.calls.endpoint import EndpointError, UnavailableError
from fastp3o.cli import parse
from fastp3o.models.loading import load_policy
from fastp3o.objectives.config.p3o import P3OConfig
from fastp3o.packing.pack import Packing
from fastp3o.rewards.comparisons import Comparison
from fastp3o.rewards.judge import (
    PATTERN,
    ChatEndpoint,
    EndpointJudge,
    preferred_by_logprobs,
    question,
    read_template,
)
from fastp3o.rewards.judged import ONE_LETTER, EndpointComparisons, LocalComparisons
from fastp3o.rewards.verdicts import VerdictFile
from fastp3o.rollouts.groups import Prompt
from tests.fastp3o.evaluation.test_judge import SERVED as JUDGES
from tests.fastp3o.evaluation.test_judge import Question, base, prefers_the_longer, says
from tests.fastp3o.groups import groups_of_texts
from tests.fastp3o.local_server import Reply
from tests.fastp3o.runs import (
    assert_equal,
    assert_resumes,
    config,
    copy_at_save_before,
    metrics,
    weights,
)

SERVED = JUDGES


def comparisons_at(url: str, path: Path | None = None, **settings) -> EndpointComparisons:
    endpoint = ChatEndpoint(url, "m", timeout=5.0, retries=0)
    return EndpointComparisons(
        EndpointJudge(endpoint, file=VerdictFile(path), requests=4, logprobs=True, **settings)
    )


def with_logprobs(first: float, second: float, tie: float = 0.0) -> bytes:
    """An answer whose letter has these probabilities, in a token that begins within the brackets."""
    entries = [
        {"token": token, "top_logprobs": []} for token in ("It", " is [[", "B]] at first, no: [")
    ]
    chances = {"[A": first, "[B": second, "[C": tie, "(A": 0.5}
    top = [
        {"token": token, "logprob": math.log(chance)} for token, chance in chances.items() if chance
    ]
    entries += [{"token": "[A", "top_logprobs": top}, {"token": "]]", "top_logprobs": []}]
    return says("It is [[B]] at first, no: [[A]]", logprobs={"content": entries})


# --- an endpoint ----------------------------------------------------------------------------------


def test_the_probability_is_that_of_the_last_marks_letter_a_tie_half():
    def probability(body: bytes) -> float | None:
        return ChatEndpoint("http://a", "m").read_answer(body).preferred

    assert probability(with_logprobs(0.6, 0.2)) == pytest.approx(0.75)
    assert probability(with_logprobs(0.3, 0.1, 0.2)) == pytest.approx((0.3 + 0.1) / 0.6)
    for body in (
        says("[[A]]"),
        says("[[A]]", logprobs=None),
        says("[[A]]", logprobs={"content": None}),
    ):
        assert probability(body) is None
    assert preferred_by_logprobs({"content": [{"token": "no mark", "top_logprobs": []}]}) is None


@pytest.mark.parametrize(
    ("token", "counts"),
    [("B", True), ("B]", True), ("B]].", True), ("Both", False), ("B-", False), ("B]-", False)],
)
def test_an_alternative_counts_only_where_it_may_end_as_a_mark(token, counts):
    top = [
        {"token": other, "logprob": math.log(chance)}
        for other, chance in (("A", 0.6), (token, 0.3))
    ]
    entries = [{"token": "[[", "top_logprobs": []}, {"token": "A", "top_logprobs": top}]
    entries.append({"token": "]]", "top_logprobs": []})
    expected = 0.6 / 0.9 if counts else 1.0
    assert preferred_by_logprobs({"content": entries}) == pytest.approx(expected)


def test_both_orders_make_one_probability_and_a_place_that_is_preferred_cancels(server):
    asked = []

    def reply(asked_question: Question) -> Reply:
        asked.append(asked_question[:3])
        return Reply(
            body=with_logprobs(0.6, 0.2)
            if asked_question.first == "good"
            else with_logprobs(0.3, 0.3)
        )

    server.reply = reply
    matrix = comparisons_at(base(server)).matrix(
        groups_of_texts(["good", "bad"], ["bad", "good"], ["x", "y"])
    )
    expected = (0.75 + 1 - 0.5) / 2 - 0.5
    assert matrix[:, 0, 1].tolist() == pytest.approx([expected, -expected, 0])
    assert len(asked) == len(set(asked)) == 6
    assert all(body["logprobs"] and body["temperature"] == 0 for body in server.requests)


def test_without_log_probs_the_verdict_counts_and_a_server_that_refuses_them_is_asked_without(
    server,
):
    server.reply = prefers_the_longer
    values = comparisons_at(base(server)).matrix(
        groups_of_texts(["long", "b"], ["ab", "cd"], ["a", "longer"])
    )
    assert values[:, 0, 1].tolist() == [0.5, 0, -0.5]
    server.reply = lambda asked: asked
    server.question = lambda body, number: (
        Reply(400, b'{"error": "logprobs are not supported"}')
        if "logprobs" in body
        else prefers_the_longer(JUDGES[2](body, number))
    )
    reward = comparisons_at(base(server))
    reward.judge.requests = 1
    before = len(server.requests)
    assert reward.matrix(groups_of_texts(["long", "b"], ["ab", "c"]))[:, 0, 1].tolist() == [
        0.5,
        0.5,
    ]
    assert ["logprobs" in body for body in server.requests[before:]] == [
        True,
        False,
        False,
        False,
        False,
    ]
    server.question = lambda body, number: Reply(401)
    with pytest.raises(EndpointError, match="401"):
        comparisons_at(base(server)).matrix(groups_of_texts(["long", "b"]))


def test_a_server_without_log_probs_is_named_before_the_run(server, capsys):
    prompt = groups_of_texts(["a", "b"])[0].prompt
    for reply, said in (
        (Reply(body=with_logprobs(0.6, 0.2)), ""),
        (Reply(body=says("[[A]]")), "gives no log-probs of the verdict's letter"),
        (Reply(body=says("hm")), "has no verdict"),
    ):
        server.reply = lambda asked, reply=reply: reply
        comparisons_at(base(server)).check(prompt)
        warned = capsys.readouterr().out
        assert said in warned
        assert warned.count("warning") == bool(said)


def test_a_verdict_is_kept_before_it_counts_and_never_asked_for_again_not_even_if_there_was_none(
    server, tmp_path
):
    groups, path = (
        groups_of_texts(["long", "b", "c"], ["b", "long", "silent"]),
        tmp_path / "v.jsonl",
    )
    silent = Reply(body=says("hm"))
    server.reply = lambda asked: (
        silent if "silent" in (asked.first, asked.second) else Reply(body=with_logprobs(0.7, 0.1))
    )
    reward = comparisons_at(base(server), path)
    assert not path.exists()  # before anything is asked
    reward.check(groups[0].prompt)
    assert not path.exists()
    first = reward.matrix(groups)
    assert reward.answered[1].tolist() == [0.5, 0.5, 0]
    again = comparisons_at("http://127.0.0.1:1", path)
    assert torch.equal(again.matrix(groups), first)
    assert torch.equal(again.answered, reward.answered)


def test_verdicts_of_other_processes_are_known_and_left_as_they_are(server, tmp_path):
    groups, other = groups_of_texts(["long", "b"]), tmp_path / "verdicts-1.jsonl"
    comparisons_at(base(server), other).matrix(groups)
    with other.open("ab") as file:
        file.write(b'{"key": "half')
    content, asked = other.read_bytes(), len(server.requests)
    judge = EndpointJudge(
        ChatEndpoint(base(server), "m"),
        file=VerdictFile(tmp_path / "verdicts.jsonl", [other]),
        requests=1,
    )
    assert EndpointComparisons(judge).matrix(groups)[0, 0, 1] == 0.5
    assert (other.read_bytes(), len(server.requests)) == (content, asked)


def test_principles_stand_in_the_question_and_templates_that_cannot_are_refused(tmp_path):
    (tmp_path / "principles.txt").write_text("Be kind for $5.\n\n  Be brief.\n")
    asked = question("p", "one", "two", read_template(None, str(tmp_path / "principles.txt")))
    assert "Judge by these principles:\n- Be kind for $5.\n- Be brief.\n" in asked
    assert "[[C]] for a tie" in asked
    assert "helpful, relevant" not in asked
    assert "helpful, relevant" in question("p", "one", "two")
    (tmp_path / "own.txt").write_text("$prompt: $first or $second? $$")
    assert (
        question("p", "one", "two", read_template(str(tmp_path / "own.txt"), None))
        == "p: one or two? $"
    )
    for template, principles, said in (
        ("own.txt", "principles.txt", r"has no \$criteria"),
        ("bad.txt", None, "may have"),
        ("lacks.txt", None, r"lacks \$second"),
        (None, "empty.txt", "has no text"),
    ):
        files = {
            "bad.txt": "$prompt $first $second $other",
            "lacks.txt": "$prompt $first",
            "empty.txt": " \n",
        }
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=said):
            read_template(*(name and str(tmp_path / name) for name in (template, principles)))


# --- a model on this machine ----------------------------------------------------------------------


def test_a_model_on_this_machine_answers_a_or_b_by_its_next_token_in_both_orders(tiny_model):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    device = torch.device("cpu")
    template = read_template(None, None, ONE_LETTER)
    reward = LocalComparisons(
        load_policy(tiny_model), tokenizer, template, device=device, packing=Packing(900)
    )
    groups = groups_of_texts(["a tree", "house", "house"], ["x", "y", "z"])
    matrix = reward.matrix(groups)
    model = AutoModelForCausalLM.from_pretrained(tiny_model)

    def probability(prompt: Prompt, first: str, second: str) -> float:
        ids = tokenizer(question(prompt.text, first, second, template) + "\n\nAnswer:").input_ids
        logprobs = []
        for letter in (" A", " B"):
            tokens = tokenizer(letter, add_special_tokens=False).input_ids
            with torch.no_grad():
                values = model(torch.tensor([ids + tokens])).logits[0].log_softmax(-1)
            logprobs.append(
                sum(values[len(ids) - 1 + n, token].item() for n, token in enumerate(tokens))
            )
        return 1 / (1 + math.exp(logprobs[1] - logprobs[0]))

    for group, values in zip(groups, matrix, strict=True):
        for i, j in ((0, 1), (0, 2), (1, 2)):
            first, second = group.responses[i].text, group.responses[j].text
            both = (
                probability(group.prompt, first, second)
                + 1
                - probability(group.prompt, second, first)
            ) / 2
            assert values[i, j].item() == pytest.approx(
                0.0 if first == second else both - 0.5, abs=1e-5
            )
            assert values[j, i] == -values[i, j]
    assert "Explain" not in ONE_LETTER
    assert ONE_LETTER != PATTERN
    long = [
        Comparison(
            groups[0].prompt, *(r._replace(text=r.text * 2000) for r in groups[0].responses[:2])
        )
    ]
    with pytest.raises(UserError, match=r"positions|tokens"):
        reward.ask(long)


def test_a_run_asks_a_model_on_this_machine(workplace, tiny_model):
    train(
        config(
            tiny_model,
            "run",
            reward="judge",
            judge_model=tiny_model,
            updates=2,
            responses_per_prompt=3,
        )
    )
    assert metrics("run")[0]["reward_difference"] > 0
    assert metrics("run")[0]["reward_answered"] == 1


# --- runs -----------------------------------------------------------------------------------------


def judged(server, tiny_model: str, folder: str, **changes) -> P3OConfig:
    settings = {
        "reward": "judge",
        "judge_url": base(server),
        "judge_model": "m",
        "judge_requests": 2,
    }
    return config(
        tiny_model, folder, **(settings | {"save_every": 2, "responses_per_prompt": 3} | changes)
    )


def prefers_vowels(asked: Question) -> Reply:
    counts = [
        sum(c in "aeiou" for c in text) + len(set(text)) / 100
        for text in (asked.first, asked.second)
    ]
    first = 1 / (1 + math.exp(counts[1] - counts[0]))
    return Reply(body=with_logprobs(first, 1 - first))


def questions(server) -> Counter:
    """Of a run, without those of the trial before it."""
    asked = [json.dumps(body["messages"]) for body in server.requests]
    return Counter(text for text in asked if "\\nresponse\\n" not in text)


def test_a_judged_run_resumes_to_the_same_bits_and_never_asks_for_a_verdict_twice(
    workplace, tiny_model, server
):
    server.reply = prefers_vowels
    settings = judged(server, tiny_model, "run", eval_prompts="prompts.jsonl", eval_every=2)
    train(settings)
    asked = questions(server)
    assert set(asked.values()) == {1}
    assert metrics("run", "eval.jsonl")[0]["win_rate"] == 0.5
    assert_resumes(settings)
    assert questions(server) == asked
    # Killed while it wrote: what is lost of the file is asked for again, and nothing else.
    copy_at_save_before("run", "killed")
    lines = Path("killed/verdicts.jsonl").read_bytes().splitlines(keepends=True)
    Path("killed/verdicts.jsonl").write_bytes(b"".join(lines[:-3]) + lines[-3][:40])
    train(replace(settings, output_dir="killed", resume=True))
    assert_equal(weights("run"), weights("killed"))
    assert sum((questions(server) - asked).values()) == 6
    assert sorted(Path("killed/verdicts.jsonl").read_bytes().splitlines()) == sorted(
        line.rstrip() for line in lines
    )


def test_a_judge_that_fails_stops_the_run_which_continues_with_what_was_paid_for(
    workplace, tiny_model, server
):
    server.reply = prefers_vowels
    train(judged(server, tiny_model, "whole"))
    expected = questions(server)
    server.requests.clear()
    server.question = lambda body, number: None if number > 60 else JUDGES[2](body, number)
    server.reply = lambda asked: Reply(401) if asked is None else prefers_vowels(asked)
    settings = judged(server, tiny_model, "run")
    with pytest.raises(EndpointError, match="401"):
        train(settings)
    refused = questions(server) & Counter(
        json.dumps(body["messages"]) for body in server.requests[60:]
    )
    server.question, server.reply = JUDGES[2], prefers_vowels
    train(replace(settings, resume=True))
    assert_equal(weights("whole"), weights("run"))
    again = {text for text, count in questions(server).items() if count > 1}
    # An order that was answered is asked for again only with the other one, if that was refused.
    assert len(again) <= 2 * sum(refused.values())
    assert set(questions(server)) == set(expected)


def test_a_judge_that_is_away_or_late_is_asked_as_often_and_waited_for_as_long_as_flags_say(
    workplace, tiny_model, server
):
    server.reply = prefers_vowels
    train(judged(server, tiny_model, "whole"))

    def fails_once(failure: Reply) -> None:
        number = len(server.requests) + 5
        server.question = lambda body, count: None if count == number else JUDGES[2](body, count)
        server.reply = lambda asked: failure if asked is None else prefers_vowels(asked)

    settings = judged(server, tiny_model, "run")
    for failure, said in ((Reply(503), "status 503"), (Reply(delay=2.0), "within 1 s")):
        fails_once(failure)
        with pytest.raises(UnavailableError, match=rf"{said}.*attempts: 1"):
            train(replace(settings, judge_retries=0, judge_timeout=1.0))
        settings = replace(settings, resume=True)
    fails_once(Reply(503))
    train(replace(settings, judge_retries=1))
    assert_equal(weights("whole"), weights("run"))


def test_the_recipe_of_the_page_runs_from_principles_to_a_policy(workplace, tiny_model, server):
    """Principles, a judge, P3O: no reward model and no labels."""
    page = (Path(__file__).parents[3] / "fastp3o" / "rewards" / "README.md").read_text()
    (principles,) = re.findall(r"cat > principles.txt <<'END'\n(.*?)\nEND", page, re.DOTALL)
    (command,) = re.findall(
        r"fastp3o online --objective p3o ((?:.*\\\n)*.*judge_principles.*)", page
    )
    Path("principles.txt").write_text(principles + "\n")
    server.reply = prefers_vowels
    arguments = command.replace("\\\n", " ").split()
    values = {"--model": tiny_model, "--judge_url": base(server), "--prompts": "prompts.jsonl"}
    values["--eval_prompts"] = "prompts.jsonl"
    arguments = [
        values.get(before, this) for before, this in zip(["", *arguments], arguments, strict=False)
    ]
    small = "--updates 2 --prompts_per_update 4 --prompts_per_minibatch 2 --max_response_tokens 5 --precision fp32 "
    small += "--report_to none"
    train(parse(P3OConfig, [*arguments, *small.split()]))
    assert all(
        line in server.requests[0]["messages"][0]["content"] for line in principles.splitlines()
    )
    assert "win_rate" in metrics("runs/judged", "eval.jsonl")[-1]
    assert Path("runs/judged/verdicts.jsonl").exists()
    assert Path("runs/judged/best/evaluation.json").exists()


def test_a_judge_needs_a_model_and_is_no_more_than_it_says(tiny_model, tmp_path):
    with pytest.raises(UserError, match="--reward judge asks a language model: give --judge_model"):
        config(tiny_model, str(tmp_path), reward="judge").check_complete()
    with pytest.raises(UserError, match="--judge_url has no effect without --reward judge"):
        config(tiny_model, str(tmp_path), judge_url="http://a", judge_model="m").check_complete()
