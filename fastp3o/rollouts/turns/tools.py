"""An environment of Python functions as tools."""

import inspect
import json
import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from transformers.utils import get_json_schema

# As Hermes, Qwen and others write calls.
CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)  # calls that are no JSON object


def tool_environment(tools: Sequence[Callable]) -> type:
    """An environment that answers a turn's calls of these functions; a turn without one is the last. Its `schemas` are
    for the field `tools` of records, which the chat template gets.

    A call that cannot be read, names no tool or has wrong arguments is answered with what was wrong, as is a tool that
    raises: the policy learns from it. The rewards `calls` and `failed_calls` count them, with weight 0.
    """
    by_name = {tool.__name__: tool for tool in tools}

    class Tools:
        rewards: ClassVar = {"calls": 0.0, "failed_calls": 0.0}
        schemas: ClassVar = [get_json_schema(tool) for tool in tools]

        def reset(self) -> None:
            """Tools have no state of their own."""

        async def step(self, text: str) -> tuple[str | None, dict[str, float], bool]:
            calls = CALL.findall(text)
            answers = [await answer(by_name, call) for call in calls]
            failed = sum(one.startswith("error: ") for one in answers)
            return "\n".join(answers) or None, {"calls": len(calls), "failed_calls": failed}, not calls

    return Tools


async def answer(tools: dict[str, Callable], call: str) -> str:
    try:
        content = json.loads(call)
        name, arguments = content["name"], content.get("arguments", {})
    except UNREADABLE as error:
        return f'error: a call is a JSON object {{"name": ..., "arguments": {{...}}}}: {error}'
    if name not in tools:
        return f"error: there is no tool {name!r}; tools are {', '.join(tools)}"
    try:
        result = tools[name](**arguments)
        return str(await result if inspect.isawaitable(result) else result)
    except Exception as error:  # of arguments that a policy wrote, or from a tool
        return f"error: {type(error).__name__}: {error}"
