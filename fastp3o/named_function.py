"""Imports and calls a user's Python function, given by name."""

import asyncio
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from fastp3o.errors import UserError

Result = TypeVar("Result")


class FunctionError(UserError):
    """A user's function raised, ended the program, or returned what it must not."""


# One for all calls: a client that a module keeps belongs to the loop in which it was first used.
EVENT_LOOP = asyncio.Runner()


def import_function(name: str, role: str) -> Callable:
    """Imports the function that `name` gives as `module:function`; modules of the current directory are found, too.

    Args:
        name: module, as Python imports it, and function.
        role: what the function is for, in error messages ("reward function").

    Raises:
        ValueError: the name has another form, module or function do not exist, or it is no function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise UserError(f"the {role} must be given as module:function, got {name!r}")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), function)
    except (Exception, SystemExit) as error:  # a module is a program of the user's and may raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise UserError(f"cannot load the {role} {name!r}: {kind}{error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise UserError(f"cannot load the {role} {name!r}: it is a {type(found).__name__}, not a function")
    return found


def call_for_list(function: Callable, name: str, *arguments: list[str], **columns: list) -> list:
    """Calls the function and returns its result as a list, with one entry for each of the last argument's. The result
    may be a list, a tuple, an array or a tensor; an `async def` is awaited. columns: keyword arguments.

    Raises FunctionError, with the function's name, if it returns another type or another number of entries, if it
    raises (with the place), and if it ends the program, which would look like the end of a run.
    """
    try:
        result = function(*arguments, **columns)
        if inspect.iscoroutine(result):
            result = awaited(result)
    except SystemExit as error:
        raise FunctionError(
            f"{name} ended the program (sys.exit, status {error.code!r}) instead of returning"
        ) from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = type(error).__name__
        raise FunctionError(f"{name} failed in {place.filename}, line {place.lineno}: {kind}: {error}") from error
    if hasattr(result, "tolist"):
        result = result.tolist()
    expected = len(arguments[-1])
    if not isinstance(result, list | tuple):
        raise FunctionError(f"{name} must return a list of {expected} entries, got a {type(result).__name__}")
    if len(result) != expected:
        raise FunctionError(f"{name} must return {expected} entries, one a response, got {len(result)}")
    return list(result)


def awaited(coroutine: Coroutine[object, None, Result]) -> Result:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return EVENT_LOOP.run(coroutine)
    # A thread runs one loop, and this one runs a notebook's.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(EVENT_LOOP.run, coroutine).result()
