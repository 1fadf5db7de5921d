"""Python functions as tools that the policy calls (../tools.md): their schemas, and the environment
that answers.
"""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from transformers.utils import get_json_schema

from fastp3o.calls.function import import_function, raised_by_itself
from fastp3o.errors import UserError, shown, text_of, visible
from fastp3o.rollouts.turns.calls import Call
from fastp3o.sources import InMemory, Source

COUNTS = CALLS, FAILED = "tool_calls", "failed_tool_calls"  # as rewards of turns, and as metrics
PAGE = "fastp3o/rollouts/tools.md"
# Parameters of these kinds have no name by which a call could give them.
UNNAMED = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.VAR_KEYWORD,
)


# --- functions as tools ---------------------------------------------------------------------------


class Tool(NamedTuple):
    """A function that the policy may call. schema: as chat templates take it: name, description,
    parameters.
    """

    name: str
    function: Callable[..., Any]
    schema: dict[str, Any]


def load_tools(tools: Source) -> list[Tool]:
    """The tools of the option `tools`. Raises UserError for a function that cannot be one, and for
    two of one name.
    """
    if isinstance(tools, InMemory):
        functions = tools.value
    else:
        functions = [import_function(name.strip(), "tool") for name in tools.split(",")]
    loaded = [make_tool(function) for function in functions]
    names = [tool.name for tool in loaded]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"--tools: two tools have the name {twice[0]!r}, by which the policy calls them"
        )
    return loaded


def make_tool(function: Any) -> Tool:
    """Raises UserError for what is no function with a name, and for one whose hints and docstring
    give no schema.
    """
    name = getattr(function, "__name__", "")
    if not inspect.isroutine(function) or not name.isidentifier():
        raise UserError(
            f"--tools: a tool must be a function with a name, which `def` gives it, got {shown(function)}"
        )
    try:
        unnamed = [
            one.name
            for one in inspect.signature(function).parameters.values()
            if one.kind in UNNAMED
        ]
        schema = get_json_schema(function)
    except Exception as error:  # of hints and docstrings
        needs = f"a tool needs type hints, and a docstring that describes its arguments ({PAGE})"
        raise UserError(f"--tools: {name}: {text_of(error)}: {needs}") from error
    if unnamed:
        raise UserError(
            f"--tools: {name}: a call gives arguments by name, and {unnamed[0]} has none"
        )
    return Tool(name, function, schema)


# --- the environment that answers -----------------------------------------------------------------


def tool_environment(tools: Sequence[Tool]) -> type:
    """An environment that answers a turn's calls; a turn without one is the last.

    A call that cannot be read, names no tool or has wrong arguments is answered with what was
    wrong, as is a tool that raises anything, also to end the program: the policy learns from it.
    Rewards of weight 0 count both.
    """
    functions = {tool.name: tool.function for tool in tools}

    class Tools:
        rewards: ClassVar = dict.fromkeys(COUNTS, 0.0)

        def reset(self) -> None:
            """Tools have no state of their own."""

        async def step(self, calls: list[Call]) -> tuple[str | None, dict[str, float], bool]:
            answers = [await answer(functions, call) for call in calls]
            failed = sum(one.startswith("error: ") for one in answers)
            return "\n".join(answers) or None, {CALLS: len(calls), FAILED: failed}, not calls

    return Tools


async def answer(functions: Mapping[str, Callable[..., Any]], call: Call) -> str:
    if call.error:
        return f"error: {call.error}"
    if call.name not in functions:
        return f"error: there is no tool {call.name!r:.80}; tools are {', '.join(functions)}"
    try:
        result = functions[call.name](**call.arguments)
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
