"""Talking to models: what a model is told, and what is shown of its answers."""

import io
import sys

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastp3o.__main__ import main
from fastp3o.commands.chat import ChatConfig, load
from fastp3o.errors import UserError

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat(monkeypatch: pytest.MonkeyPatch, lines: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fastp3o", "chat", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    monkeypatch.setenv("COLUMNS", "300")  # a table's names are not cut
    main()


@pytest.fixture(scope="module")
def chat_model(tiny_model, tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


def told(speaker, monkeypatch) -> list[str]:
    """The prompts that the sampler gets."""
    prompts, sample = [], speaker.sampler

    def listening(asked, *arguments):
        prompts.extend(prompt.text for prompt in asked)
        return sample(asked, *arguments)

    monkeypatch.setattr(speaker, "sampler", listening)
    return prompts


def test_a_model_with_a_template_is_told_the_whole_conversation(chat_model, monkeypatch):
    speaker = load(
        chat_model, ChatConfig(model=chat_model, system="Be brief", max_response_tokens=5)
    )
    prompts = told(speaker, monkeypatch)
    first, _ = speaker.answer("Hello", 0)
    speaker.answer("And now?", 1)
    assert prompts[0] == "<system>Be brief</s><user>Hello</s><assistant>"
    assert (
        prompts[1]
        == f"<system>Be brief</s><user>Hello</s><assistant>{first.strip()}</s><user>And now?</s><assistant>"
    )
    speaker.begin()
    speaker.answer("Again", 2)
    assert prompts[2] == "<system>Be brief</s><user>Again</s><assistant>"


def test_a_model_without_one_continues_text(tiny_model, monkeypatch):
    plain = load(tiny_model, ChatConfig(model=tiny_model, max_response_tokens=5))
    prompts = told(plain, monkeypatch)
    plain.answer("Once", 0)
    plain.answer("Twice", 1)
    assert prompts == ["Once", "Twice"]
    turns = load(
        tiny_model, ChatConfig(model=tiny_model, max_response_tokens=5, turn="\\nQ: {}\\nA:")
    )
    prompts = told(turns, monkeypatch)
    first, _ = turns.answer("Once", 0)
    turns.answer("Twice", 1)
    assert prompts == ["\nQ: Once\nA:", f"\nQ: Once\nA:{first}\nQ: Twice\nA:"]


def test_a_long_conversation_says_that_its_beginning_is_gone(tiny_model):
    speaker = load(
        tiny_model, ChatConfig(model=tiny_model, max_prompt_tokens=8, max_response_tokens=5)
    )
    assert not speaker.answer("Short", 0)[1]
    assert speaker.answer("longer than eight letters", 0)[1]


def test_two_models_answer_side_by_side_and_the_likeliest_answers_are_the_same(
    tiny_model, chat_model, monkeypatch, capsys
):
    shown = []
    for _ in range(2):
        both = (
            "--model",
            tiny_model,
            "--beside",
            chat_model,
            "--temperature",
            "0",
            "--max_response_tokens",
            "6",
        )
        chat(monkeypatch, "Hello\n\n/new\nHello\n/quit\nnot read\n", *both)
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]
    assert shown[0].count(chat_model[-12:]) == 2, (
        "two tables, of one message before /new and one behind it"
    )
    assert "not read" not in shown[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--turn", "no place"), "--turn must hold {}"),
        (("--system", "Be brief"), "--system has no effect without a chat template"),
        (("--temperature", "-1"), "--temperature"),
    ],
)
def test_what_cannot_work_is_refused(tiny_model, monkeypatch, capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        chat(monkeypatch, "Hello\n", "--model", tiny_model, *arguments)
    assert message in str(ended.value.code) + capsys.readouterr().err


def test_an_empty_message_is_no_error(tiny_model, monkeypatch, capsys):
    chat(monkeypatch, "\n  \n", "--model", tiny_model)
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError):
        load(tiny_model, ChatConfig(model=tiny_model)).answer("", 0)
