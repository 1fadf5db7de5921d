"""An environment of Python functions as tools."""

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, ClassVar

from transformers.utils import get_json_schema

from fastp3o.calls.function import raised_by_itself
from fastp3o.errors import text_of, visible

__all__ = ["tool_environment"]

# As Hermes, Qwen and others write calls.
BEGIN, END = "<tool_call>", "</tool_call>"
UNREADABLE = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)  # calls that are no JSON object


def tool_environment(tools: Sequence[Callable]) -> type:
    """An environment that answers a turn's calls of these functions; a turn without one is the
    last. Its `schemas` are for the field `tools` of records, which the chat template gets.

    A call that cannot be read, names no tool or has wrong arguments is answered with what was
    wrong, as is a tool that raises anything, also to end the program: the policy learns from it.
    The rewards `calls` and `failed_calls` count them, with weight 0.
    """
    by_name = {tool.__name__: tool for tool in tools}

    class Tools:
        rewards: ClassVar = {"calls": 0.0, "failed_calls": 0.0}
        schemas: ClassVar = [get_json_schema(tool) for tool in tools]

        def reset(self) -> None:
            """Tools have no state of their own."""

        async def step(self, text: str) -> tuple[str | None, dict[str, float], bool]:
            answers = [await answer(by_name, call) for call in calls_in(text)]
            failed = sum(one.startswith("error: ") for one in answers)
            return (
                "\n".join(answers) or None,
                {"calls": len(answers), "failed_calls": failed},
                not answers,
            )

    return Tools


def calls_in(text: str) -> Iterator[str]:
    """The texts between the marks of tool calls, stripped of white space, in time linear in the
    text.
    """
    place = text.find(BEGIN)
    while place >= 0 and (end := text.find(END, place)) >= 0:
        yield text[place + len(BEGIN) : end].strip()
        place = text.find(BEGIN, end)


async def answer(tools: dict[str, Callable], call: str) -> str:
    try:
        name, arguments = read_call(call)
    except UNREADABLE as error:
        return f'error: a call is a JSON object {{"name": ..., "arguments": {{...}}}}: {error}'
    if name not in tools:
        return f"error: there is no tool {name!r:.80}; tools are {', '.join(tools)}"
    try:
        result = tools[name](**arguments)
        return str(await result_of(result) if inspect.isawaitable(result) else result)
    except BaseException as error:  # of arguments, or of a tool, which may run what a policy wrote
        if not raised_by_itself(error):
            raise
        return f"error: {visible(type(error).__name__)}: {text_of(error)}"


async def result_of(awaitable: Awaitable) -> object:
    """Awaits in a separate task: a GeneratorExit would be thrown into every coroutine that awaits
    this one.
    """
    task = asyncio.ensure_future(awaitable)
    try:
        await asyncio.wait({task})
    finally:
        task.cancel()
    return task.result()


def read_call(call: str) -> tuple[str, dict[str, Any]]:
    """The tool's name and its arguments. Raises one of UNREADABLE."""
    content = json.loads(call)
    name, arguments = content["name"], content.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError("the name is text, and the arguments are an object")
    return name, arguments
