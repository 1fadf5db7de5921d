"""A row -> a prompt and its responses, as text or as messages.

| columns                       | responses | used by                                                       |
|-------------------------------|-----------|---------------------------------------------------------------|
| prompt, chosen, rejected      | 2         | strings, or lists of messages (also whole dialogues)          |
| chosen, rejected              | 2         | Anthropic HH: two dialogue texts; or two lists of messages    |
| info, summaries, choice       | 2         | OpenAI's TL;DR comparisons                                    |
| prompt, label                 | 1         | TL;DR demonstrations                                          |
| prompt, completion            | 1         |                                                               |
| prompt, response              | 1         |                                                               |
| messages                      | 1         | conversations; the assistant's last message is the response   |
| prompt                        | 0         |                                                               |

Strings are used as they are. No white space is put between a prompt and its response: a leading space belongs to the
response. Only the comparisons are formatted here, because their rows hold the parts of a prompt.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastp3o.data.errors import MISSING, Found, RowError

Message = dict[str, Any]
Fields = Mapping[str, Any]

HH_REPLY, HH_TURN = "\n\nAssistant:", "\n\nHuman:"


class Part(NamedTuple):
    """A prompt (text or messages) or a response (text or a list of one assistant's message), and where it came from."""

    field: str
    value: str | list[Message]


@dataclass(frozen=True)
class Layout:
    """Columns that a row must have, how many responses it holds, and how to read them. Readers raise RowError."""

    columns: tuple[str, ...]
    count: int
    prompt: Callable[[Fields], Part]
    responses: Callable[[Fields], tuple[Part, ...]]

    def __str__(self) -> str:
        return "/".join(self.columns)


def find_layout(row: Fields, responses: int) -> Layout:
    """The layout whose columns the row has and which holds at least `responses`. Raises RowError where none fits."""
    accepted = [layout for layout in LAYOUTS if layout.count >= responses]
    for layout in accepted:
        if all(column in row for column in layout.columns):
            return layout
    raise RowError(None, f"the columns of one of the layouts {', '.join(map(str, accepted))}", row)


# --- values ---------------------------------------------------------------------------------------------------------


def text(row: Fields, field: str, name: str | None = None) -> str:
    """The string in a field; `name` is how errors call the field where it is nested."""
    value, name = row.get(field, MISSING), name or field
    if not isinstance(value, str) or value is MISSING or not value.strip():
        raise RowError(name, "text", value)
    if not is_unicode(value):
        raise RowError(name, "text", Found("a string with half of a surrogate pair"))
    return value


def is_unicode(value: str) -> bool:
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def object_in(row: Fields, field: str) -> Fields:
    value = row.get(field, MISSING)
    if not isinstance(value, Mapping):
        raise RowError(field, "an object", value)
    return value


def message(value: object, name: str) -> Message:
    """One message without its null fields, which typed files add to every message."""
    if not isinstance(value, Mapping):
        raise RowError(name, "a message with role and content", value)
    role = text(value, "role", f"{name}.role")
    if not (role == "system" and value.get("content") == ""):
        text(value, "content", f"{name}.content")
    return {field: content for field, content in value.items() if content is not None}


def messages(row: Fields, field: str) -> list[Message]:
    value = row.get(field, MISSING)
    if not isinstance(value, list) or not value:
        raise RowError(field, "a list of messages", value)
    return [message(item, f"{field}[{index}]") for index, item in enumerate(value)]


def ends_with(conversation: list[Message], roles: tuple[str, ...], field: str) -> list[Message]:
    role = conversation[-1]["role"]
    if role not in roles:
        raise RowError(field, f"a last message of {' or '.join(roles)}", Found(f"one of role '{role[:40]}'"))
    return conversation


# --- strings, or messages with a prompt of their own ----------------------------------------------------------------


def prompt_column(row: Fields) -> Part:
    if isinstance(row.get("prompt"), list):
        return Part("prompt", ends_with(messages(row, "prompt"), ("user", "tool"), "prompt"))
    return Part("prompt", text(row, "prompt"))


def response_column(row: Fields, field: str) -> Part:
    """Text after a text, an assistant's message after messages."""
    if not isinstance(row.get("prompt"), list):
        return Part(field, text(row, field))
    reply = ends_with(messages(row, field), ("assistant",), field)
    if len(reply) > 1:
        raise RowError(field, "one message", reply)
    return Part(field, reply)


def demonstration(field: str) -> Layout:
    return Layout(("prompt", field), 1, prompt_column, lambda row: (response_column(row, field),))


# --- conversations --------------------------------------------------------------------------------------------------


def messages_prompt(row: Fields) -> Part:
    conversation = ends_with(messages(row, "messages"), ("assistant", "user", "tool"), "messages")
    if conversation[-1]["role"] == "assistant":
        conversation = before_reply(conversation, "messages")
    return Part("messages", conversation)


def messages_response(row: Fields) -> tuple[Part, ...]:
    conversation = ends_with(messages(row, "messages"), ("assistant",), "messages")
    return (Part("messages", conversation[-1:]),)


def before_reply(conversation: list[Message], field: str) -> list[Message]:
    if len(conversation) < 2:
        raise RowError(field, "messages before the assistant's", Found("a single message"))
    return ends_with(conversation[:-1], ("user", "tool"), field)


# --- chosen and rejected --------------------------------------------------------------------------------------------


def pair_prompt(row: Fields) -> Part:
    if not holds_dialogues(row):
        return prompt_column(row)
    shared = dialogues(row)[0]
    prompt = row.get("prompt")
    if prompt != shared.value and prompt not in [item["content"] for item in shared.value]:
        raise RowError("prompt", "the messages that 'chosen' starts with, or the text of one of them", prompt)
    return shared


def pair_responses(row: Fields) -> tuple[Part, ...]:
    if holds_dialogues(row):
        return dialogues(row)[1:]
    return response_column(row, "chosen"), response_column(row, "rejected")


def holds_dialogues(row: Fields) -> bool:
    """Whether 'chosen' repeats the prompt's messages before the reply."""
    chosen = row.get("chosen")
    return isinstance(chosen, list) and len(chosen) > 1


def dialogues(row: Fields) -> tuple[Part, Part, Part]:
    """(shared messages, chosen reply, rejected reply) of two conversations that differ in their last message."""
    chosen, rejected = (ends_with(messages(row, field), ("assistant",), field) for field in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise RowError("rejected", "the messages of 'chosen' but for the last", Found("others"))
    return Part("chosen", before_reply(chosen, "chosen")), Part("chosen", chosen[-1:]), Part("rejected", rejected[-1:])


def hh_dialogues(row: Fields) -> tuple[Part, Part, Part]:
    """(shared text, chosen reply, rejected reply) of two dialogue texts that differ after the last "Assistant:"."""
    chosen, rejected = text(row, "chosen"), text(row, "rejected")
    before = chosen.rpartition(HH_REPLY)[0]
    if not before.strip():
        raise RowError("chosen", f"a dialogue with {HH_REPLY!r}", chosen)
    shared = before + HH_REPLY
    if not rejected.startswith(shared):
        raise RowError("rejected", f"the text of 'chosen' up to its last {HH_REPLY!r}", Found("another dialogue"))
    return Part("chosen", shared), hh_reply(chosen, shared, "chosen"), hh_reply(rejected, shared, "rejected")


def hh_reply(dialogue: str, shared: str, field: str) -> Part:
    reply = dialogue[len(shared) :]
    if HH_REPLY in reply or HH_TURN in reply:
        raise RowError(field, "one reply after the shared text", Found("further turns"))
    return Part(field, text({field: reply}, field))


def implicit_pair(row: Fields) -> tuple[Part, Part, Part]:
    return dialogues(row) if isinstance(row.get("chosen"), list) else hh_dialogues(row)


# --- TL;DR comparisons ----------------------------------------------------------------------------------------------


def comparison_prompt(row: Fields) -> Part:
    """The post in OpenAI's format; subreddit and title are left out where the record has none."""
    info = object_in(row, "info")
    parts = [f"SUBREDDIT: r/{info['subreddit']}"] if has_text(info, "subreddit") else []
    parts += [f"TITLE: {info['title']}"] if has_text(info, "title") else []
    return Part("info.post", "\n\n".join([*parts, f"POST: {text(info, 'post', 'info.post')}", "TL;DR:"]))


def has_text(info: Fields, field: str) -> bool:
    return info.get(field) not in (None, "") and bool(text(info, field, f"info.{field}"))


def comparison_responses(row: Fields) -> tuple[Part, ...]:
    summaries, choice = row.get("summaries", MISSING), row.get("choice", MISSING)
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise RowError("summaries", "a list of two summaries", summaries)
    if isinstance(choice, bool) or choice not in (0, 1) or not isinstance(choice, int):
        raise RowError("choice", "0 or 1, the index of the better summary", choice)
    return tuple(summary(summaries[index], f"summaries[{index}]") for index in (choice, 1 - choice))


def summary(value: object, name: str) -> Part:
    if not isinstance(value, Mapping):
        raise RowError(name, "an object with text", value)
    return Part(f"{name}.text", " " + text(value, "text", f"{name}.text").strip())


# Rows may fit several (many preference sets repeat their dialogues in `messages`), so the order decides.
LAYOUTS = (
    Layout(("prompt", "chosen", "rejected"), 2, pair_prompt, pair_responses),
    Layout(("chosen", "rejected"), 2, lambda row: implicit_pair(row)[0], lambda row: implicit_pair(row)[1:]),
    Layout(("info", "summaries", "choice"), 2, comparison_prompt, comparison_responses),
    demonstration("label"),
    demonstration("completion"),
    demonstration("response"),
    Layout(("messages",), 1, messages_prompt, messages_response),
    Layout(("prompt",), 0, prompt_column, lambda row: ()),
)
