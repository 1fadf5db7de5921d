"""The calls of tools that a turn of the policy makes, as its chat template writes them."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from fastp3o.errors import UserError, text_of
from fastp3o.packing.packed_row import Ids

# As Hermes, Qwen and others write calls.
BEGIN, END = "<tool_call>", "</tool_call>"
# Calls that are no JSON object.
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)
FIELD = "tool_calls"  # of a message, in which a response template has the calls


class Call(NamedTuple):
    """A call of a tool. error: why it cannot be read; "" if it can."""

    name: str
    arguments: dict[str, Any]
    error: str = ""


ReadCalls = Callable[[Ids, Ids], list[Call]]


def call_reader(tokenizer: PreTrainedTokenizerBase, schemas: Sequence[dict[str, Any]]) -> ReadCalls:
    """A function that reads the calls of a turn from the ids before it, the prompt's among them,
    and its own. It raises nothing for what a policy may write: what cannot be read is a Call with
    an error.

    The tokenizer's `response_template` says how calls are written; where it has none, or none for
    calls, they are Hermes's: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Both see
    special tokens. schemas: of the tools, by which a response template casts arguments that are
    written as text. Raises UserError for a response template that transformers refuses.
    """

    def text(ids: Ids) -> str:
        return str(
            tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    if not writes_calls(tokenizer):
        return lambda before, ids: hermes_calls(text(ids))

    def read(before: Ids, ids: Ids) -> list[Call]:
        try:
            message = tokenizer.parse_response(text(ids), prefix=text(before), tools=list(schemas))
            calls = message.get(FIELD, [])
            return [read_call(call) for call in (calls if isinstance(calls, list) else [calls])]
        except Exception as error:
            # a response template is a program of the model's author and may raise anything
            return [Call("", {}, f"the calls of this turn cannot be read: {text_of(error)}")]

    return read


def writes_calls(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has a response template that says how calls are written."""
    template = getattr(tokenizer, "response_template", None)
    if template is None:
        return False
    try:
        tokenizer.get_response_parser(prefix="")
    except Exception as error:
        raise UserError(
            f"the response template of {tokenizer.name_or_path} is refused: {text_of(error)}"
        ) from error
    return FIELD in template["fields"]


def hermes_calls(text: str) -> list[Call]:
    """The calls between Hermes's marks, in their order."""
    calls = []
    for content in calls_in(text):
        try:
            calls.append(read_call(json.loads(content)))
        except UNREADABLE as error:
            expected = 'a call is a JSON object {"name": ..., "arguments": {...}}'
            calls.append(Call("", {}, f"{expected}: {text_of(error)}"))
    return calls


def calls_in(text: str) -> Iterator[str]:
    """The texts between the marks of tool calls, stripped of white space, in time linear in the
    text.
    """
    place = text.find(BEGIN)
    while place >= 0 and (end := text.find(END, place)) >= 0:
        yield text[place + len(BEGIN) : end].strip()
        place = text.find(BEGIN, end)


def read_call(content: Any) -> Call:
    """A call from its name and arguments, or from the `function` that has them. Raises one of
    UNREADABLE.
    """
    content = (
        content["function"] if isinstance(content, Mapping) and "function" in content else content
    )
    name, arguments = content["name"], content.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("the name is text, and the arguments are an object")
    return Call(name, arguments)
