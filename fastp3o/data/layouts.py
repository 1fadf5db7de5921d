"""Reads a record as a prompt and its responses, text or messages. README.md lists the layouts, with
examples.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastp3o.data.errors import MISSING, Found, RecordError, is_blank

Message = dict[str, Any]
Fields = Mapping[str, Any]

LARGEST_FP32 = 3.4e38

HH_REPLY, HH_TURN = "\n\nAssistant:", "\n\nHuman:"


class Part(NamedTuple):
    """A prompt (text or messages) or a response (text or a list with one assistant message);
    `field` is its source.
    """

    field: str
    value: str | list[Message]


@dataclass(frozen=True)
class Layout:
    """How to read the records of one form. fields: names that a record must have. response_count:
    responses in a record, 0 to 2; a ranking may have more. prompt, responses: functions that read
    them, or raise RecordError.
    """

    fields: tuple[str, ...]
    response_count: int
    prompt: Callable[[Fields], Part]
    responses: Callable[[Fields], tuple[Part, ...]]

    def __str__(self) -> str:
        return "/".join(self.fields)


# --- values of fields -----------------------------------------------------------------------------


def text(record: Fields, field: str, name: str | None = None) -> str:
    """The string in a field. name: the field's name in errors, if it is nested."""
    value, name = record.get(field, MISSING), name or field
    if not isinstance(value, str) or is_blank(value):
        raise RecordError(name, "text", value)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RecordError(name, "text", Found("a string with half of a surrogate pair")) from error
    return value


def message(value: object, name: str) -> Message:
    """One message without its null fields, which are none to chat templates. Parts of its content
    are joined. It may have no content if it calls tools, or is what a tool answered.
    """
    if not isinstance(value, Mapping):
        raise RecordError(name, "a message with role and content", value)
    role, content = text(value, "role", f"{name}.role"), value.get("content")
    if isinstance(content, list):
        parts = {f"{name}.content[{index}]": part for index, part in enumerate(content)}
        for place, part in parts.items():
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise RecordError(place, "a part of type text, with its text", part)
        content = "".join(text(part, "text", f"{place}.text") for place, part in parts.items())
    if not content and (
        value.get("tool_calls") or role == "tool" or (role == "system" and content == "")
    ):
        content = ""
    else:
        content = text(
            {**value, "content": content} if content is not None else value,
            "content",
            f"{name}.content",
        )
    return {field: item for field, item in value.items() if item is not None} | {"content": content}


def messages(record: Fields, field: str) -> list[Message]:
    value = record.get(field, MISSING)
    if not isinstance(value, list) or not value:
        raise RecordError(field, "a list of messages", value)
    return [message(item, f"{field}[{index}]") for index, item in enumerate(value)]


def ends_with(conversation: list[Message], roles: tuple[str, ...], field: str) -> list[Message]:
    """Returns the conversation. Raises RecordError if its last message has none of the roles."""
    role = conversation[-1]["role"]
    if role not in roles:
        raise RecordError(
            field, f"a last message of {' or '.join(roles)}", Found(f"one of role '{role[:40]}'")
        )
    return conversation


# --- prompts and single responses -----------------------------------------------------------------


def prompt_field(record: Fields) -> Part:
    if isinstance(record.get("prompt"), list):
        return Part("prompt", ends_with(messages(record, "prompt"), ("user", "tool"), "prompt"))
    return Part("prompt", text(record, "prompt"))


def response_field(record: Fields, field: str) -> Part:
    """Text if the prompt is text, an assistant message if it is messages."""
    if not isinstance(record.get("prompt"), list):
        return Part(field, text(record, field))
    reply = ends_with(messages(record, field), ("assistant",), field)
    if len(reply) > 1:
        raise RecordError(field, "one message", reply)
    return Part(field, reply)


def in_prompt_form(prompt: str | list[Message], text: str) -> str | list[Message]:
    """A response as `response_field` reads it beside this prompt."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


DEMONSTRATIONS = ("label", "completion", "response")


def the_response(field: str, record: Fields) -> tuple[Part, ...]:
    """The response. Raises RecordError if two of the fields for it differ."""
    responses = {name: record[name] for name in DEMONSTRATIONS if record.get(name) is not None}
    if any(value != responses.get(field, value) for value in responses.values()):
        raise RecordError(
            None, f"one response in the fields {', '.join(responses)}", Found("different ones")
        )
    return (response_field(record, field),)


def desirable(record: Fields) -> bool:
    label = record.get("label", MISSING)
    if not isinstance(label, bool):
        raise RecordError("label", "true or false, whether the completion is desirable", label)
    return label


# --- pairs ----------------------------------------------------------------------------------------


def messages_prompt(record: Fields) -> Part:
    conversation = ends_with(
        messages(record, "messages"), ("assistant", "user", "tool"), "messages"
    )
    if conversation[-1]["role"] == "assistant":
        conversation = before_reply(conversation, "messages")
    return Part("messages", conversation)


def messages_response(record: Fields) -> tuple[Part, ...]:
    conversation = ends_with(messages(record, "messages"), ("assistant",), "messages")
    return (Part("messages", conversation[-1:]),)


def before_reply(conversation: list[Message], field: str) -> list[Message]:
    if len(conversation) < 2:
        raise RecordError(field, "messages before the assistant's", Found("a single message"))
    return ends_with(conversation[:-1], ("user", "tool"), field)


def pair_prompt(record: Fields) -> Part:
    if not holds_dialogues(record):
        return prompt_field(record)
    shared = dialogues(record)[0]
    prompt = (
        messages(record, "prompt")
        if isinstance(record.get("prompt"), list)
        else record.get("prompt")
    )
    contents = [message["content"] for message in shared.value if isinstance(message, dict)]
    if prompt != shared.value and prompt not in contents:
        raise RecordError(
            "prompt", "the messages that 'chosen' starts with, or the text of one of them", prompt
        )
    return shared


def pair_responses(record: Fields) -> tuple[Part, ...]:
    if holds_dialogues(record):
        return dialogues(record)[1:]
    return response_field(record, "chosen"), response_field(record, "rejected")


# --- pairs of Anthropic's HH ----------------------------------------------------------------------


def holds_dialogues(record: Fields) -> bool:
    """Whether 'chosen' repeats the prompt's messages before the reply."""
    chosen = record.get("chosen")
    return isinstance(chosen, list) and len(chosen) > 1


def dialogues(record: Fields) -> tuple[Part, Part, Part]:
    """Shared messages, chosen reply and rejected reply of two conversations that differ in their
    last message.
    """
    chosen, rejected = (
        ends_with(messages(record, field), ("assistant",), field)
        for field in ("chosen", "rejected")
    )
    if chosen[:-1] != rejected[:-1]:
        raise RecordError("rejected", "the messages of 'chosen' except the last", Found("others"))
    return (
        Part("chosen", before_reply(chosen, "chosen")),
        Part("chosen", chosen[-1:]),
        Part("rejected", rejected[-1:]),
    )


def hh_dialogues(record: Fields) -> tuple[Part, Part, Part]:
    """Shared text, chosen reply and rejected reply of two dialogue texts that differ after the last
    "Assistant:".
    """
    chosen, rejected = text(record, "chosen"), text(record, "rejected")
    before = chosen.rpartition(HH_REPLY)[0]
    if not before.strip():
        raise RecordError("chosen", f"a dialogue with {HH_REPLY!r}", chosen)
    shared = before + HH_REPLY
    if not rejected.startswith(shared):
        raise RecordError(
            "rejected",
            f"the text of 'chosen' up to its last {HH_REPLY!r}",
            Found("another dialogue"),
        )
    return (
        Part("chosen", shared),
        hh_reply(chosen, shared, "chosen"),
        hh_reply(rejected, shared, "rejected"),
    )


def hh_reply(dialogue: str, shared: str, field: str) -> Part:
    reply = dialogue[len(shared) :]
    if HH_REPLY in reply or HH_TURN in reply:
        raise RecordError(field, "one reply after the shared text", Found("further turns"))
    return Part(field, text({field: reply}, field))


# --- pairs that begin with the same text ----------------------------------------------------------


def implicit_pair(record: Fields) -> tuple[Part, Part, Part]:
    """Prompt, chosen reply and rejected reply of a record that has its prompt only inside its two
    dialogues.
    """
    return dialogues(record) if isinstance(record.get("chosen"), list) else hh_dialogues(record)


# --- rankings -------------------------------------------------------------------------------------


def ranked_responses(record: Fields) -> tuple[Part, ...]:
    """The responses from best to worst, each in the form that `response_field` reads."""
    ranked, field = record.get("ranked_responses", MISSING), "ranked_responses"
    if not isinstance(ranked, list) or len(ranked) < 2:
        raise RecordError(field, "a list of two responses or more, from best to worst", ranked)
    if record.get("margin") is not None:
        raise RecordError("margin", "none in a ranking: it is of two responses", record["margin"])
    if record.get("probability") is not None:
        raise RecordError(
            "probability", "none in a ranking: it is of two responses", record["probability"]
        )
    by_name = {f"{field}[{number}]": item for number, item in enumerate(ranked)}
    return tuple(response_field({"prompt": record["prompt"], **by_name}, name) for name in by_name)


def margin(record: Fields) -> float:
    """The margin by which the chosen response is better; 0 if the record has none."""
    value = record.get("margin")
    if value is None:
        return 0.0
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 <= value <= LARGEST_FP32
    ):
        raise RecordError("margin", "a finite number, 0 or more", value)
    return float(value)


def probability(record: Fields) -> float:
    """The probability that the chosen response is better: a soft label, ½ for a tie; 1 if the
    record has none.
    """
    value = record.get("probability")
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise RecordError(
            "probability", "a number from 0 to 1, that the chosen response is better", value
        )
    if record.get("margin") is not None:
        raise RecordError(
            "margin",
            "none beside a probability, which says how much better it is",
            record["margin"],
        )
    return float(value)


def require_preferred(record: Fields) -> None:
    """Raises RecordError if the chosen response is not the better one, by the record's own
    probability.
    """
    if (value := probability(record)) <= 0.5:
        raise RecordError(
            "probability", "more than 0.5: only the reward stage learns ties and soft labels", value
        )


# --- comparisons of summaries ---------------------------------------------------------------------


def comparison_prompt(record: Fields) -> Part:
    """The post in OpenAI's format, with subreddit and title if the record has them."""
    info = record.get("info", MISSING)
    if not isinstance(info, Mapping):
        raise RecordError("info", "an object", info)
    parts = [
        head + text(info, field, f"info.{field}")
        for head, field in (
            ("SUBREDDIT: r/", "subreddit"),
            ("TITLE: ", "title"),
            ("POST: ", "post"),
        )
        if field == "post" or info.get(field) not in (None, "")
    ]
    return Part("info.post", "\n\n".join([*parts, "TL;DR:"]))


def comparison_responses(record: Fields) -> tuple[Part, ...]:
    summaries, choice = record.get("summaries", MISSING), record.get("choice", MISSING)
    if not isinstance(summaries, list) or len(summaries) != 2:
        raise RecordError("summaries", "a list of two summaries", summaries)
    if type(choice) is not int or choice not in (0, 1):
        raise RecordError("choice", "0 or 1, the index of the better summary", choice)
    responses = []
    for name, value in (
        (f"summaries[{index}]", summaries[index]) for index in (choice, 1 - choice)
    ):
        if not isinstance(value, Mapping):
            raise RecordError(name, "an object with text", value)
        responses.append(Part(f"{name}.text", " " + text(value, "text", f"{name}.text").strip()))
    return tuple(responses)


# The first one that a record fits counts: many preference sets repeat their dialogues in
# `messages`.
LAYOUTS = (
    Layout(("prompt", "chosen", "rejected"), 2, pair_prompt, pair_responses),
    Layout(
        ("chosen", "rejected"),
        2,
        lambda pair: implicit_pair(pair)[0],
        lambda pair: implicit_pair(pair)[1:],
    ),
    Layout(("info", "summaries", "choice"), 2, comparison_prompt, comparison_responses),
    *(
        Layout(("prompt", field), 1, prompt_field, partial(the_response, field))
        for field in DEMONSTRATIONS
    ),
    Layout(("messages",), 1, messages_prompt, messages_response),
    Layout(("prompt",), 0, prompt_field, lambda record: ()),
)

# Plain text comes after nothing, or after its first token.
DEMONSTRATION_LAYOUTS = (
    *LAYOUTS,
    Layout(
        ("text",),
        1,
        lambda record: Part("text", ""),
        lambda record: (Part("text", text(record, "text")),),
    ),
)

# The reward model takes all responses of a record.
RANKINGS = (
    Layout(("prompt", "ranked_responses"), 2, prompt_field, ranked_responses),
    *(layout for layout in LAYOUTS if layout.response_count == 2),
)

# These are not in LAYOUTS: demonstrations have these fields too, so a stage takes one or the other.
UNPAIRED_PREFERENCES = (
    Layout(
        ("prompt", "completion", "label"),
        1,
        prompt_field,
        lambda record: (response_field(record, "completion"),),
    ),
)


# --- choice of the layout -------------------------------------------------------------------------


def find_layout(record: Fields, responses: int, layouts: Sequence[Layout] = LAYOUTS) -> Layout:
    """The first layout with at least `responses` responses whose fields the record has. RecordError
    if none fits.
    """
    accepted = [layout for layout in layouts if layout.response_count >= responses]
    for layout in accepted:
        if all(field in record for field in layout.fields):
            return layout
    one = "one of the layouts" if len(accepted) > 1 else "the layout"
    raise RecordError(None, f"the fields of {one} {', '.join(map(str, accepted))}", record)
