"""What a record says and a model would not learn, or would learn twice, is refused by name or said
in the line.
"""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from fastp3o.data.errors import DataError
from fastp3o.data.loading import (
    DataReport,
    load_demonstrations,
    load_preferences,
    load_prompts,
    load_rankings,
    load_unpaired_preferences,
)
from fastp3o.sources import InMemory
from tests.fastp3o.data.test_encoding import byte_tokenizer
from tests.fastp3o.families import FAMILIES, Family, every_chat_family

LIMITS = {"max_prompt_tokens": 900, "max_response_tokens": 900}
PLAIN = byte_tokenizer()
BY_NAME = {family.name: family for family in FAMILIES}
SAID = ("reasoning_content", "reasoning", "thinking", "function_call")
ASKED = {"role": "user", "content": "2+2?"}


def read(load, records: list[Any], tokenizer: PreTrainedTokenizerBase = PLAIN, **options: Any):
    return load(InMemory("<records>", records), tokenizer, **LIMITS | options)


def reply(content: str = "It is 4.", **fields: Any) -> dict:
    return {"role": "assistant", "content": content, **fields}


def read_or_refused(load, record: dict, tokenizer: PreTrainedTokenizerBase) -> tuple[Any, str]:
    """The only example, or the reason why there is none."""
    try:
        data, _ = read(load, [record], tokenizer)
    except DataError as error:
        return None, str(error)
    return data[0], ""


@every_chat_family
@pytest.mark.parametrize("name", SAID)
def test_what_a_reply_says_is_learnt_or_refused_by_name(family: Family, name: str):
    tokenizer = family.tokenizer()
    messages = [ASKED, reply(**{name: "two and two"})]
    example, refusal = read_or_refused(load_demonstrations, {"messages": messages}, tokenizer)
    if example is None:
        assert name in refusal
        assert "move it into the content" in refusal
    else:
        assert "two and two" in tokenizer.decode(example["response_ids"])
    # Of both responses.
    other = {
        "prompt": [ASKED],
        "chosen": [reply()],
        "rejected": [reply("No.", **{name: "two and two"})],
    }
    example, refusal = read_or_refused(load_preferences, other, tokenizer)
    if example is None:
        assert f"field 'rejected': expected a reply whose {name}" in refusal
    else:
        assert "two and two" in tokenizer.decode(example["rejected_ids"])


def test_one_text_may_have_several_names_and_nothing_is_no_text():
    tokenizer = BY_NAME["qwen3"].tokenizer()
    both = reply(reasoning_content="two and two", reasoning="two and two")
    data, report = read(load_demonstrations, [{"messages": [ASKED, both]}], tokenizer)
    assert "two and two" in tokenizer.decode(data[0]["response_ids"])
    assert not report.unread
    with pytest.raises(DataError, match="a reply whose reasoning the chat"):
        read(
            load_demonstrations, [{"messages": [ASKED, both | {"reasoning": "or not"}]}], tokenizer
        )
    empty = reply(reasoning_content=" ", thinking="", reasoning=None)
    read(load_demonstrations, [{"messages": [ASKED, empty]}], BY_NAME["gemma3"].tokenizer())


@every_chat_family
def test_thinking_of_earlier_turns_is_no_error(family: Family):
    """Templates leave it out on purpose; those that never read it are said not to."""
    tokenizer, name = (
        family.tokenizer(),
        "thinking" if family.name.startswith("gptoss") else "reasoning_content",
    )
    messages = [ASKED, reply("4", **{name: "two and two"}), ASKED, reply()]
    data, report = read(load_demonstrations, [{"messages": messages}], tokenizer)
    assert len(data) == 1
    reads = name in tokenizer.chat_template
    assert list(report.unread) == ([] if reads else [f"{name} of messages"])
    _, report = (
        read(load_prompts, [{"prompt": messages[:3]}], tokenizer, max_response_tokens=None)
        if False
        else (
            load_prompts(
                InMemory("<prompts>", [{"prompt": messages[:3]}]), tokenizer, max_prompt_tokens=900
            )
        )
    )
    assert list(report.unread) == ([] if reads else [f"{name} of messages"])


def test_fields_that_a_template_does_not_read_are_named_once():
    template = (
        "{% for m in messages %}{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: {{ m.content }}\n{% endfor %}"
        "{% if tools %}{% for tool in tools %}{{ tool.title }}{% endfor %}{% endif %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    about = {"id": 7, "weight": 1, "title": "x", "created": "2026", "tags": [], "note": None}
    messages = [ASKED | {"name": "Ann"} | about, reply(**about)]
    _, report = read(
        load_demonstrations,
        [{"messages": messages, "source": "web"}] * 3,
        byte_tokenizer("$A", template),
    )
    named = [
        "source",
        "id of messages",
        "weight of messages",
        "title of messages",
        "created of messages",
    ]
    assert list(report.unread) == named
    assert str(report).endswith("; nothing reads the fields " + ", ".join(named))


@every_chat_family
@pytest.mark.parametrize(
    "content",
    ["    return 1\n", "oak", "oak\n", "<think>x</think>oak", "<think>\nx\n</think>\n\noak"],
)
def test_replies_that_a_template_changes_are_counted(family: Family, content: str):
    tokenizer = family.tokenizer()
    _, report = read(load_demonstrations, [{"messages": [ASKED, reply(content)]}], tokenizer)
    written = tokenizer.apply_chat_template([ASKED, reply(content)], tokenize=False)
    assert report.changed_replies == (content not in written)
    assert ("1 replies that the chat template trims or changes" in str(report)) == (
        content not in written
    )
    pair = {"prompt": [ASKED], "chosen": [reply(content)], "rejected": [reply(content + " no")]}
    _, report = read(load_preferences, [pair] * 2, tokenizer)
    assert report.changed_replies % 2 == 0


QUESTION = "\n\nHuman: Hi\n\nAssistant:"


def repeating(prompt: str) -> dict[str, tuple]:
    """Records of each layout of text whose responses repeat the prompt, with what loads them."""
    pair = {"prompt": prompt, "chosen": prompt + " Hello", "rejected": prompt + " no"}
    return {
        "chosen": (load_preferences, pair),
        "margin": (load_rankings, pair),
        "demonstration": (load_demonstrations, pair),
        "completion": (load_demonstrations, {"prompt": prompt, "completion": prompt + " Hello"}),
        "ranking": (
            load_rankings,
            {"prompt": prompt, "ranked_responses": [prompt + word for word in ("a", "b", "c")]},
        ),
        "label": (
            load_unpaired_preferences,
            {"prompt": prompt, "completion": prompt + " Hello", "label": True},
        ),
    }


@pytest.mark.parametrize("kind", repeating(""))
@pytest.mark.parametrize("prompt", [QUESTION, "Q: a long question?\n", "1+1="])
def test_a_file_whose_responses_all_repeat_their_prompt_is_refused(kind: str, prompt: str):
    load, record = repeating(prompt)[kind]
    others = [record, repeating("Another " + prompt)[kind][1]]
    with pytest.raises(
        DataError, match=r"<records>: expected responses without the prompt .* each of 2 records"
    ):
        read(load, others)
    # One alone, or one of many, may be meant.
    plain = json.loads(
        json.dumps(record)
        .replace(json.dumps(prompt)[1:-1], "", 2)
        .replace('"prompt": ""', '"prompt": "p"')
    )
    for records in ([record], [*others, {**plain, "prompt": prompt}]):
        data, report = read(load, records)
        assert len(data) == len(records)
        assert report.repeated_prompts == min(len(records), 2)
        assert f"; responses of {report.repeated_prompts} records repeat the prompt" in str(report)


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.text("ab ", min_size=1).filter(str.strip), st.text("ab ").map("c".__add__)),
        min_size=1,
    )
)
def test_responses_of_their_own_stay_as_they_are(pairs):
    """Also where one response of two begins with the prompt, as the code that it completes."""
    records = [
        {"prompt": prompt, "chosen": prompt + response, "rejected": response}
        for prompt, response in pairs
    ]
    data, report = read(load_preferences, records)
    assert report == DataReport(examples=len(records))
    assert [PLAIN.decode(ids[:-1]) for ids in data["chosen_ids"]] == [
        one["chosen"] for one in records
    ]


def test_messages_that_repeat_their_prompt_are_dialogues_and_prompts_alone_repeat_nothing():
    chat = byte_tokenizer("$A", "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}")
    whole = {"prompt": [ASKED], "chosen": [ASKED, reply("4")], "rejected": [ASKED, reply("5")]}
    assert not read(load_preferences, [whole] * 2, chat)[1].repeated_prompts
    echo = {"prompt": [ASKED], "completion": [reply("2+2?")]}
    assert not read(load_demonstrations, [echo] * 2, chat)[1].repeated_prompts
    _, report = load_prompts(
        InMemory("<prompts>", [repeating(QUESTION)["chosen"][1]] * 2), PLAIN, max_prompt_tokens=99
    )
    assert not report.repeated_prompts
