"""Critique and revision by principles, and the recipe from principles to P3O as its page has it."""

import copy
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

from fastp3o.__main__ import main
from fastp3o.data.loading import load_demonstrations, load_preferences
from fastp3o.errors import UserError
from fastp3o.generate import loop
from fastp3o.generate.config import SelectionConfig
from fastp3o.generate.loop import generate
from fastp3o.generate.revision import read_principles, revising
from fastp3o.generate.samples import Samples
from fastp3o.generate.selection import kept_records
from tests.fastp3o.evaluation.test_judge import JUDGES
from tests.fastp3o.evaluation.test_win_rates import save
from tests.fastp3o.generate.test_generate import config, contents, records
from tests.fastp3o.rollouts.environments import LETTERS
from tests.fastp3o.test_examples import TEMPLATE

PAGE = Path(loop.__file__).parents[1] / "data" / "README.md"
REVISED = {
    "reward": None,
    "keep": "revised",
    "principles": "principles.txt",
    "stop_strings": LETTERS[::3],
}
REVISED |= {"max_response_tokens": 8, "keep_unfinished": False, "limit": 4}


@pytest.fixture
def principles(workplace):
    Path("principles.txt").write_text("Be brief.\n\nBe kind.\nBe {honest}.\n")


def test_principles_are_lines_or_requests(principles):
    assert read_principles("principles.txt")[2] == [
        "Criticise your response by this principle: Be {honest}.",
        "Rewrite it to follow this one: Be {honest}.",
    ]
    Path("own.jsonl").write_text('{"critique": "Bad?", "revision": "Better!"}\n')
    assert read_principles("own.jsonl") == [["Bad?", "Better!"]]
    for line in ("{", "[]", '{"critique": "Bad?"}', '{"critique": "Bad?", "revision": 3}'):
        Path("own.jsonl").write_text('{"critique": "Bad?", "revision": "Better!"}\n' + line)
        with pytest.raises(UserError, match=r"own\.jsonl: principle 2 must have the texts"):
            read_principles("own.jsonl")
    Path("own.jsonl").write_text("\n")
    for name, said in (("own.jsonl", "has no text"), ("nosuch", "cannot be read")):
        with pytest.raises(UserError, match=f"--principles {name} {said}"):
            read_principles(name)


def played(texts: list[str], seed: int = 0) -> list[tuple]:
    options = revising(
        read_principles("principles.txt"),
        rounds=2,
        turn_tokens=16,
        chats=True,
        room=99,
        seed=seed,
    )
    environment = options["environment"].value()
    environment.reset("Say tree:")
    return [environment.step(text) for text in texts]


def test_each_round_asks_by_a_principle_of_its_own(principles):
    talk = played(list("abcde"))
    requests = [request.strip() for request, _, _ in talk[:4]]
    assert all(pair in read_principles("principles.txt") for pair in (requests[:2], requests[2:]))
    assert [over for *_, over in talk] == [False] * 4 + [True]
    assert played(list("abcde")) == talk
    assert len({played(["a"], seed)[0][0] for seed in range(9)}) == 3
    assert len({played([text])[0][0] for text in "abcdefghi"}) == 3
    assert (
        len({tuple(request for request, *_ in played("abc", seed)[::2]) for seed in range(60)}) == 9
    )
    assert played(["a", " "])[-1][-1], "an empty critique ends it"


def test_a_cut_critique_is_no_revision():
    turns = [
        [{"text": text, "read_back": True} for text in texts]
        for texts in ("a", "ab", "abc", "abcd", "ab ", "aba")
    ]
    one = Samples(0, "Say:", {}, ["x"] * 6, [1] * 6, [False] * 6, [], [True] * 6, turns)
    for keep, unfinished, expected in (
        ("revised", True, ["c", "a"]),
        ("revised_pairs", True, ["c"]),
        ("revised", False, []),
    ):
        kept = kept_records(one, SelectionConfig(keep=keep, keep_unfinished=unfinished), seed=0)
        assert [record.get("completion", record.get("chosen")) for record in kept] == expected


def test_revisions_come_after_critiques_and_are_data(
    principles, tiny_model, tokenizer, monkeypatch
):
    """A resumed run has the same bits, and makes pairs of them without sampling."""
    done = generate(config(tiny_model, "run", revisions=2, **REVISED))
    asked = [request for pair in read_principles("principles.txt") for request in pair]
    expected, pairs = [], []
    for line in records("run", "samples.jsonl"):
        for whole, finished, turns in zip(
            line["responses"], line["finished"], line["turns"], strict=True
        ):
            texts = [turn["text"] for turn in turns]
            parts = re.split(
                r"\n\n(?:Critique|Revision) Request: (.*)\n\n(?:Critique|Revision):", whole
            )
            assert parts[::2] == texts
            assert set(parts[1::2]) <= set(asked)
            assert (
                len({request.partition(":")[2].split("one:")[-1] for request in parts[1:4:2]}) <= 1
            )
            if finished and texts[-1].strip():
                assert len(texts) == 5
                expected.append((line["prompt"], texts[-1]))
                pairs += [(texts[-1], texts[0])] if texts[0].strip() != texts[-1].strip() else []
    assert [(line["prompt"], line["completion"]) for line in records("run")] == expected
    assert (
        done.records
        == len(expected)
        > 2
        < done.unfinished
        == done.responses - len(expected) - done.empty
    )
    samples, kept = contents("run")
    Path("run/samples.jsonl").write_bytes(samples[: samples.index(b'{"number": 3') + 9])
    generate(config(tiny_model, "run", revisions=2, resume=True, **REVISED))
    assert contents("run") == [samples, kept]
    limits = {"max_prompt_tokens": 32, "max_response_tokens": 32}
    assert len(load_demonstrations("run/kept.jsonl", tokenizer, **limits)[0]) == len(expected)
    monkeypatch.setattr(loop, "load_models", None)
    generate(
        config(tiny_model, "run", revisions=2, resume=True, **REVISED | {"keep": "revised_pairs"})
    )
    assert [(line["chosen"], line["rejected"]) for line in records("run")] == pairs
    load_preferences("run/kept.jsonl", tokenizer, **limits)
    Path("principles.txt").write_text("Be long.\n")
    with pytest.raises(UserError, match=r"content has changed since the run began: --principles"):
        generate(config(tiny_model, "run", revisions=2, resume=True, **REVISED))


def test_in_chats_the_template_writes_the_requests(principles, tiny_model, tokenizer):
    save(tiny_model, "chat", template=TEMPLATE)
    user = {"role": "user", "content": "Say tree:"}
    Path("prompts.jsonl").write_text(json.dumps({"prompt": [user]}) + "\n")
    generate(config("chat", "run", **REVISED | {"responses_per_prompt": 16}))
    chat = copy.deepcopy(tokenizer)
    chat.chat_template = TEMPLATE
    (line,) = records("run", "samples.jsonl")
    assert all(record["prompt"] == [user] for record in records("run"))
    asked = dict(map(tuple, read_principles("principles.txt")))
    whole = [turns for turns in line["turns"] if len(turns) == 3]
    assert len(whole) > 2
    for text, turns in zip(line["responses"], line["turns"], strict=True):
        if turns in whole:
            first = next(request for request in asked if request in text)
            contents = [turns[0]["text"], first, turns[1]["text"], asked[first]]
            roles = ("assistant", "user") * 2
            talk = [
                {"role": role, "content": content}
                for role, content in zip(roles, contents, strict=True)
            ]
            written = chat.apply_chat_template(
                [user, *talk], tokenize=False, add_generation_prompt=True
            )
            start = chat.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
            assert start + text == written.replace("<end>", "") + turns[2]["text"]


def test_the_recipe_from_principles_to_p3o(principles, tiny_model, monkeypatch):
    """The page's commands as they stand, with flags that make them small."""
    Path("judges.py").write_text(JUDGES.replace("longer", "better"))
    short = "--max_prompt_tokens 32 --max_response_tokens 8"
    sampled = f"{short} --responses_per_prompt 2 --stop_strings {shlex.quote(json.dumps(LETTERS))}"
    trained = f"{short} --report_to none --learning_rate 1e-3"
    online = (
        f"{trained} --updates 2 --prompts_per_update 4 --prompts_per_minibatch 4 --inner_epochs 1"
    )
    more = {"generate": sampled, "sft": trained, "reward": trained, "p3o": online}
    block = PAGE.read_text().partition("### From principles to P3O")[2].split("```")[1]
    commands = [line for line in block.splitlines() if line.startswith("fastp3o ")]
    assert len(commands) == 5
    for command in commands:
        _, name, *flags = shlex.split(command.replace("BASE", tiny_model))
        monkeypatch.setattr(sys, "argv", ["fastp3o", name, *flags, *shlex.split(more[name])])
        main()
    first, second = records("runs/p3o", "metrics.jsonl")
    assert first["reward"] != second["reward"]
    assert records("runs/pairs")[0].keys() == {"prompt", "chosen", "rejected"}
