"""Each layout's prompt and responses, and the field that is named where a record cannot be used."""

from typing import Any

import pytest

from fastp3o.data.errors import RecordError
from fastp3o.data.layouts import UNPAIRED_PREFERENCES, desirable, find_layout

USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello!"}
BAD = {"role": "assistant", "content": "What?"}
DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: A joke\n\nAssistant:"
COMPARISON = {
    "info": {"post": "I ran.", "title": "A run", "subreddit": "running", "id": "t3_1"},
    "summaries": [{"text": " ran ", "policy": "sup4"}, {"text": "Someone ran.", "policy": "ref"}],
    "choice": 1,
}


def read(record: dict[str, Any], responses: int) -> tuple[Any, ...]:
    layout = find_layout(record, responses)
    return (layout.prompt(record).value, *(part.value for part in layout.responses(record)))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi"}, ("Hi",)),
        ({"prompt": [USER]}, ([USER],)),
        ({"prompt": "Hi", "label": " Hello!", "id": 3}, ("Hi", " Hello!")),
        ({"prompt": "Hi", "completion": "Hello!"}, ("Hi", "Hello!")),
        ({"prompt": "Hi", "response": "Hello!"}, ("Hi", "Hello!")),
        ({"prompt": [USER], "completion": [GOOD]}, ([USER], [GOOD])),
        ({"messages": [USER, GOOD]}, ([USER], [GOOD])),
        ({"prompt": "Hi", "messages": [USER, GOOD, USER, BAD]}, ([USER, GOOD, USER], [BAD])),
        ({"prompt": "Hi", "chosen": " a", "rejected": " b"}, ("Hi", " a", " b")),
        ({"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}, ([USER], [GOOD], [BAD])),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ([USER], [GOOD], [BAD])),
        ({"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ([USER], [GOOD], [BAD])),
        ({"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, ([USER], [GOOD], [BAD])),
        ({"chosen": DIALOGUE + " Knock.", "rejected": DIALOGUE + " No."}, (DIALOGUE, " Knock.", " No.")),
        (
            COMPARISON,
            ("SUBREDDIT: r/running\n\nTITLE: A run\n\nPOST: I ran.\n\nTL;DR:", " Someone ran.", " ran"),
        ),
    ],
    ids=lambda value: "/".join(value) if isinstance(value, dict) else "as",
)
def test_layouts(record: dict[str, Any], expected: tuple[Any, ...]):
    assert read(record, len(expected) - 1) == expected
    assert find_layout(record, 0).prompt(record).value == expected[0], "prompts must be those that the other stages see"


@pytest.mark.parametrize("info", [{"post": "I ran."}, {"post": "I ran.", "title": None, "subreddit": ""}])
def test_a_comparison_without_title_and_subreddit(info: dict[str, Any]):
    assert read({**COMPARISON, "info": info}, 2)[0] == "POST: I ran.\n\nTL;DR:"


def test_messages_may_end_with_the_user_where_only_a_prompt_is_needed():
    record = {"messages": [USER, GOOD, USER]}
    assert find_layout(record, 0).prompt(record).value == [USER, GOOD, USER]


def test_null_fields_of_messages_and_empty_system_messages():
    system = {"role": "system", "content": ""}
    record = {"messages": [system, {**USER, "tool_calls": None}, {**GOOD, "name": None}]}
    assert read(record, 1) == ([system, USER], [GOOD])


def test_null_fields_make_no_other_prompt_of_the_messages_that_a_pair_starts_with():
    asked, said = {**USER, "name": None}, {"tool_calls": None}
    record = {"prompt": [asked], "chosen": [USER | said, GOOD | said], "rejected": [USER | said, BAD | said]}
    assert read(record, 2) == ([USER], [GOOD], [BAD])


def test_preferences_serve_as_demonstrations():
    record = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
    assert find_layout(record, 1).responses(record)[0].value == "a"


def test_unpaired_preferences_have_a_boolean_label():
    for prompt, completion in (("Hi", " a"), ([USER], [GOOD])):
        record = {"prompt": prompt, "completion": completion, "label": False}
        layout = find_layout(record, 1, UNPAIRED_PREFERENCES)
        (response,) = layout.responses(record)
        assert (layout.prompt(record).value, response.value, desirable(record)) == (prompt, completion, False)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"completion": " a", "label": " a"}, "field 'label': expected true or false, whether the completion is"),
        ({"completion": " a", "label": 1}, "got the number 1"),
        ({"completion": " a", "label": None}, "got null"),
        ({"completion": "", "label": True}, "field 'completion': expected text, got an empty string"),
        ({"label": " a"}, "expected the fields of the layout prompt/completion/label, got an object with the fields"),
        ({"completion": " a"}, "expected the fields of the layout prompt/completion/label"),
        ({"chosen": " a", "rejected": " b"}, "expected the fields of the layout prompt/completion/label"),
    ],
)
def test_what_is_no_unpaired_preference_is_said(fields: dict[str, Any], said: str):
    record = {"prompt": "Hi", **fields}
    with pytest.raises(RecordError) as caught:
        (find_layout(record, 1, UNPAIRED_PREFERENCES).responses(record), desirable(record))
    assert said in str(caught.value.at("kto.jsonl", 1))


@pytest.mark.parametrize(
    ("responses", "accepted"),
    [
        (2, "prompt/chosen/rejected, chosen/rejected, info/summaries/choice"),
        (1, "prompt/label, prompt/completion, prompt/response, messages"),
        (0, "messages, prompt"),
    ],
)
def test_an_unknown_layout_lists_the_fields_and_what_is_accepted(responses: int, accepted: str):
    with pytest.raises(RecordError) as caught:
        find_layout({"question": "Hi", "answer": "Ho"}, responses)
    message = str(caught.value.at("qa.jsonl", 1))
    assert message.startswith("qa.jsonl record 1: expected the fields of one of the layouts")
    assert f"{accepted}, got an object with the fields question, answer" in message


def pair(**fields: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "chosen": "a", "rejected": "b", **fields}


def comparison(**fields: Any) -> dict[str, Any]:
    return {**COMPARISON, **fields}


SUMMARIES = COMPARISON["summaries"]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (pair(prompt=None), "field 'prompt': expected text, got null"),
        (pair(prompt=3), "field 'prompt': expected text, got the number 3"),
        (pair(prompt=""), "field 'prompt': expected text, got an empty string"),
        (pair(prompt=True), "field 'prompt': expected text, got true"),
        (pair(prompt={"a": 1}), "field 'prompt': expected text, got an object with the fields a"),
        (pair(prompt="\ud800"), "field 'prompt': expected text, got a string with half of a surrogate pair"),
        (pair(chosen=" \n"), "field 'chosen': expected text, got only white space"),
        (pair(prompt="\u200b\u200b\ufeff"), "field 'prompt': expected text, got only white space"),
        (pair(rejected=[BAD]), "field 'rejected': expected text, got a list of 1"),
        (pair(prompt=[]), "field 'prompt': expected a list of messages, got a list of 0"),
        (pair(prompt=["Hi"]), "field 'prompt[0]': expected a message with role and content, got a string"),
        (pair(prompt=[{"content": "Hi"}]), "field 'prompt[0].role': expected text, got nothing: the field is missing"),
        (pair(prompt=[{"role": "user"}]), "field 'prompt[0].content': expected text, got nothing"),
        (pair(prompt=[GOOD]), "field 'prompt': expected a last message of user or tool, got one of role 'assistant'"),
        (pair(prompt=[USER]), "field 'chosen': expected a list of messages, got a string"),
        (pair(prompt=[USER], chosen=[USER]), "field 'chosen': expected a last message of assistant"),
        (pair(prompt=[USER], chosen=[GOOD], rejected=[USER, BAD]), "field 'rejected': expected one message"),
        (pair(chosen=[USER, GOOD], rejected=[BAD]), "field 'rejected': expected the messages of 'chosen' except"),
        (pair(prompt="Ho", chosen=[USER, GOOD], rejected=[USER, BAD]), "field 'prompt': expected the messages that"),
        ({"chosen": [GOOD], "rejected": [BAD]}, "field 'chosen': expected messages before the assistant's"),
        ({"chosen": [BAD, GOOD], "rejected": [BAD, BAD]}, "field 'chosen': expected a last message of user or tool"),
        ({"chosen": "Hi", "rejected": "Ho"}, "field 'chosen': expected a dialogue with '\\n\\nAssistant:'"),
        (
            {"chosen": DIALOGUE + " a", "rejected": "\n\nHuman: Ho\n\nAssistant: b"},
            "field 'rejected': expected the tex",
        ),
        ({"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b\n\nHuman: c"}, "field 'rejected': expected one reply"),
        ({"chosen": DIALOGUE + " a", "rejected": DIALOGUE}, "field 'rejected': expected text, got an empty string"),
        ({"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "field 'chosen': expected a dialogue"),
        ({"chosen": DIALOGUE + " a", "rejected": None}, "field 'rejected': expected text, got null"),
        (comparison(info=None), "field 'info': expected an object, got null"),
        (comparison(info={"post": None}), "field 'info.post': expected text, got null"),
        (comparison(info={"post": "I ran.", "title": 3}), "field 'info.title': expected text, got the number 3"),
        (comparison(choice=2), "field 'choice': expected 0 or 1, the index of the better summary, got the number 2"),
        (comparison(choice=True), "field 'choice': expected 0 or 1"),
        (comparison(choice=1.0), "field 'choice': expected 0 or 1"),
        (comparison(choice="1"), "field 'choice': expected 0 or 1"),
        (comparison(summaries=SUMMARIES[:1]), "field 'summaries': expected a list of two summaries, got a list of 1"),
        (comparison(summaries=[SUMMARIES[0], "ran"]), "field 'summaries[1]': expected an object with text"),
        (comparison(summaries=[{"text": ""}, SUMMARIES[1]]), "field 'summaries[0].text': expected text, got an empty"),
    ],
)
def test_bad_records_name_the_field(record: dict[str, Any], said: str):
    with pytest.raises(RecordError) as caught:
        read(record, 2)
    assert f"data.jsonl record 7 {said}" in str(caught.value.at("data.jsonl", 7))


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"prompt": "Hi", "label": None}, "field 'label': expected text, got null"),
        ({"messages": []}, "field 'messages': expected a list of messages, got a list of 0"),
        ({"messages": [USER]}, "field 'messages': expected"),
        ({"messages": [GOOD]}, "field 'messages': expected messages before the assistant's, got a single message"),
    ],
)
def test_bad_demonstrations_name_the_field(record: dict[str, Any], said: str):
    with pytest.raises(RecordError) as caught:
        read(record, 1)
    assert said in str(caught.value.at("data.jsonl", 7))
