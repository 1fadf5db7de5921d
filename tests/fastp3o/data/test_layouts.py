"""Each layout's prompt and responses, and the field that is named where a record cannot be used."""

from typing import Any

import pytest

from fastp3o.data.errors import RecordError
from fastp3o.data.layouts import (
    LAYOUTS,
    RANKINGS,
    UNPAIRED_PREFERENCES,
    Layout,
    desirable,
    find_layout,
    margin,
)

USER = {"role": "user", "content": "Hi"}
GOOD = {"role": "assistant", "content": "Hello!"}
BAD = {"role": "assistant", "content": "What?"}
DIALOGUE = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: A joke\n\nAssistant:"
COMPARISON = {
    "info": {"post": "I ran.", "title": "A run", "subreddit": "running", "id": "t3_1"},
    "summaries": [{"text": " ran ", "policy": "sup4"}, {"text": "Someone ran.", "policy": "ref"}],
    "choice": 1,
}


def read(
    record: dict[str, Any], responses: int, layouts: tuple[Layout, ...] = LAYOUTS
) -> tuple[Any, ...]:
    layout = find_layout(record, responses, layouts)
    return (layout.prompt(record).value, *(part.value for part in layout.responses(record)))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "Hi"}, ("Hi",)),
        ({"prompt": [USER]}, ([USER],)),
        ({"prompt": "Hi", "label": " Hello!", "id": 3}, ("Hi", " Hello!")),
        ({"prompt": "Hi", "completion": "Hello!"}, ("Hi", "Hello!")),
        ({"prompt": "Hi", "response": "Hello!", "label": "Hello!"}, ("Hi", "Hello!")),
        ({"prompt": [USER], "completion": [GOOD]}, ([USER], [GOOD])),
        ({"messages": [USER, GOOD]}, ([USER], [GOOD])),
        ({"prompt": "Hi", "messages": [USER, GOOD, USER, BAD]}, ([USER, GOOD, USER], [BAD])),
        ({"prompt": "Hi", "chosen": " a", "rejected": " b"}, ("Hi", " a", " b")),
        ({"chosen": [USER, GOOD], "rejected": [USER, BAD]}, ([USER], [GOOD], [BAD])),
        (
            {"prompt": "Hi", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            ([USER], [GOOD], [BAD]),
        ),
        (
            {"prompt": [USER], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            ([USER], [GOOD], [BAD]),
        ),
        (
            {"chosen": DIALOGUE + " Knock.", "rejected": DIALOGUE + " No."},
            (DIALOGUE, " Knock.", " No."),
        ),
        (
            COMPARISON,
            (
                "SUBREDDIT: r/running\n\nTITLE: A run\n\nPOST: I ran.\n\nTL;DR:",
                " Someone ran.",
                " ran",
            ),
        ),
    ],
)
def test_layouts(record: dict[str, Any], expected: tuple[Any, ...]):
    assert read(record, len(expected) - 1) == expected
    assert find_layout(record, 0).prompt(record).value == expected[0], (
        "prompts must be those that the other stages see"
    )


def test_what_else_a_record_may_have_or_lack():
    short = {"post": "I ran.", "title": None, "subreddit": ""}
    assert read({**COMPARISON, "info": short}, 2)[0] == "POST: I ran.\n\nTL;DR:"
    # The messages may end with the user where only a prompt is needed.
    talk = {"messages": [USER, GOOD, USER]}
    assert find_layout(talk, 0).prompt(talk).value == talk["messages"]
    # Null fields make no other prompt of the messages that a pair starts with; system messages may
    # be empty.
    system, null = {"role": "system", "content": ""}, {"name": None, "tool_calls": None}
    assert read({"messages": [system, USER | null, GOOD | null]}, 1) == ([system, USER], [GOOD])
    pair = {
        "prompt": [USER | {"name": None}],
        "chosen": [USER | null, GOOD],
        "rejected": [USER, BAD | null],
    }
    assert read(pair, 2) == ([USER], [GOOD], [BAD])
    # A preference serves as a demonstration, and one with a label is good or bad.
    assert find_layout(PAIR, 1).responses(PAIR)[0].value == "a"
    for prompt, completion in (("Hi", " a"), ([USER], [GOOD])):
        unpaired = {"prompt": prompt, "completion": completion, "label": False}
        assert (*read(unpaired, 1, UNPAIRED_PREFERENCES), desirable(unpaired)) == (
            prompt,
            completion,
            False,
        )


def but(record: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**record, **fields}


PAIR = {"prompt": "Hi", "chosen": "a", "rejected": "b"}
RANKING = {"prompt": "a", "ranked_responses": ["b", "c"]}
UNPAIRED = {"prompt": "Hi", "completion": " a", "label": True}
SUMMARIES, PARTS = COMPARISON["summaries"], [{"type": "text", "text": "Hi"}]
SHARED, MANY = (
    "expected the messages of 'chosen' except",
    "expected a list of two responses or more",
)
LABEL, MARGIN = (
    "field 'label': expected true or false, whether the completion is",
    "field 'margin': expected a finite ",
)
BAD_PAIRS = [
    (but(PAIR, prompt=None), "field 'prompt': expected text, got null"),
    (
        but(PAIR, prompt=10**30),
        "field 'prompt': expected text, got a number of more than twelve digits",
    ),
    (but(PAIR, prompt=True), "field 'prompt': expected text, got true"),
    (but(PAIR, prompt="\u200b \ufeff"), "field 'prompt': expected text, got only white space"),
    (
        but(PAIR, prompt="\ud800"),
        "field 'prompt': expected text, got a string with half of a surrogate pair",
    ),
    (but(PAIR, prompt=[]), "field 'prompt': expected a list of messages, got a list of 0"),
    (
        but(PAIR, prompt=["Hi"]),
        "field 'prompt[0]': expected a message with role and content, got a string",
    ),
    (but(PAIR, prompt=[{"role": "user"}]), "field 'prompt[0].content': expected text, got nothing"),
    *[
        (
            but(PAIR, prompt=[{"role": "user", "content": [*PARTS, part]}]),
            "field 'prompt[0].content[1]",
        )
        for part in ("Hi", {"type": "image", "text": "x.png"}, {"type": "text"})
    ],
    (
        but(PAIR, prompt=[GOOD]),
        "field 'prompt': expected a last message of user or tool, got one of role 'assistant'",
    ),
    (
        but(PAIR, prompt=[USER], chosen=[USER]),
        "field 'chosen': expected a last message of assistant",
    ),
    (
        but(PAIR, prompt=[USER], chosen=[GOOD], rejected=[USER, BAD]),
        "field 'rejected': expected one message",
    ),
    (but(PAIR, chosen=[USER, GOOD], rejected=[BAD]), f"field 'rejected': {SHARED}"),
    (
        but(PAIR, prompt="Ho", chosen=[USER, GOOD], rejected=[USER, BAD]),
        "field 'prompt': expected the messages that",
    ),
    (
        {"chosen": [GOOD], "rejected": [BAD]},
        "field 'chosen': expected messages before the assistant's",
    ),
    (
        {"chosen": [BAD, GOOD], "rejected": [BAD, BAD]},
        "field 'chosen': expected a last message of user or tool",
    ),
    (
        {"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"},
        "field 'chosen': expected a dialogue",
    ),
    (
        {"chosen": DIALOGUE + " a", "rejected": "\n\nHuman: Ho"},
        "field 'rejected': expected the text of 'chosen'",
    ),
    (
        {"chosen": DIALOGUE + " a", "rejected": DIALOGUE + " b\n\nHuman: c"},
        "field 'rejected': expected one reply",
    ),
    (but(COMPARISON, info=None), "field 'info': expected an object, got null"),
    (but(COMPARISON, info={"post": None}), "field 'info.post': expected text, got null"),
    *[
        (
            but(COMPARISON, choice=choice),
            "field 'choice': expected 0 or 1, the index of the better summary, got ",
        )
        for choice in (2, True, 1.0)
    ],
    (
        but(COMPARISON, summaries=SUMMARIES[:1]),
        "field 'summaries': expected a list of two summaries, got a list of 1",
    ),
    (
        but(COMPARISON, summaries=[SUMMARIES[0], "ran"]),
        "field 'summaries[1]': expected an object with text",
    ),
    (
        but(COMPARISON, summaries=[{"text": ""}, SUMMARIES[1]]),
        "field 'summaries[0].text': expected text, got an empty",
    ),
    (
        {"question": "Hi"},
        ": expected the fields of one of the layouts prompt/chosen/rejected, chosen/rejected, info/",
    ),
]
BAD_DEMONSTRATIONS = [
    (
        {"prompt": "Hi", "label": "a", "response": "b"},
        ": expected one response in the fields label, response",
    ),
    ({"messages": [USER]}, "field 'messages': expected a last message of assistant"),
]
BAD_UNPAIRED = [
    (but(UNPAIRED, label=1), LABEL),
    (
        {"prompt": "Hi", "label": " a"},
        ": expected the fields of the layout prompt/completion/label, got an object",
    ),
]
BAD_RANKINGS = [
    (
        but(RANKING, ranked_responses=["b"]),
        f"field 'ranked_responses': {MANY}, from best to worst, got a list of 1",
    ),
    (
        but(RANKING, ranked_responses=["b", None]),
        "field 'ranked_responses[1]': expected text, got null",
    ),
    (but(RANKING, margin=1), "field 'margin': expected none in a ranking: it is of two responses"),
    *[(but(PAIR, margin=margin), MARGIN) for margin in ("large", -1, True, float("inf"))],
]


@pytest.mark.parametrize(
    ("responses", "layouts", "record", "said"),
    [
        *((2, LAYOUTS, *case) for case in BAD_PAIRS),
        *((1, LAYOUTS, *case) for case in BAD_DEMONSTRATIONS),
        *((1, UNPAIRED_PREFERENCES, *case) for case in BAD_UNPAIRED),
        *((2, RANKINGS, *case) for case in BAD_RANKINGS),
    ],
)
def test_bad_records_name_the_field(
    responses: int, layouts: tuple[Layout, ...], record: dict[str, Any], said: str
):
    label = desirable if layouts is UNPAIRED_PREFERENCES else margin
    with pytest.raises(RecordError) as caught:
        (read(record, responses, layouts), label(record))
    assert f"data.jsonl record 7{'' if said.startswith(':') else ' '}{said}" in str(
        caught.value.at("data.jsonl", 7)
    )
