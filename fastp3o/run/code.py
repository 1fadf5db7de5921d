"""The hash of what a function does: its source, and the values that it reads from outside."""

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from inspect import getsource, isfunction
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor


def code_fingerprint(function: Callable[..., Any]) -> str:
    """The hash of a function's source, its defaults, its closure, and what it names of its module:
    numbers, texts, tensors, and functions, whose code counts, too. The rest of the module may
    change, as a program does whose next run resumes. Of objects their `repr` counts; of what comes
    from other modules its name alone.
    """
    digest = hashlib.sha256()
    for part in parts(function, {}):
        digest.update(part + b"\0")
    return digest.hexdigest()


def parts(value: Any, seen: dict[int, Any]) -> Iterator[bytes]:
    """What the hash reads of a value. seen: functions and containers that it has read, by their
    ids, which no other object gets as long as they stand here.
    """
    if isinstance(value, partial | FunctionType | Mapping | list | tuple):
        if id(value) in seen:
            return
        seen[id(value)] = value
    if isinstance(value, partial):
        yield from parts((value.func, value.args, value.keywords), seen)
    elif isfunction(value):
        yield from parts_of_function(value, seen)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key).encode()
            yield from parts(one, seen)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from parts(one, seen)
    elif isinstance(value, set | frozenset):
        yield repr(sorted(map(repr, value))).encode()  # each process has an order of its own
    elif isinstance(value, Tensor):
        yield f"{value.dtype} {[*value.shape]} {value.detach().cpu().flatten().tolist()}".encode()
    elif isinstance(value, ModuleType):
        yield value.__name__.encode()
    else:
        # addresses are others in each process
        yield re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).encode()


def parts_of_function(function: FunctionType, seen: dict[int, Any]) -> Iterator[bytes]:
    yield from source(function, seen)
    yield from parts((function.__defaults__, function.__kwdefaults__), seen)
    for cell in function.__closure__ or ():
        yield from parts(cell.cell_contents, seen)
    for name in sorted(names_in(function.__code__) & function.__globals__.keys()):
        value = function.__globals__[name]
        yield name.encode()
        imported = isfunction(value) and value.__module__ != function.__module__
        yield from parts(f"{value.__module__}:{value.__qualname__}" if imported else value, seen)


def source(function: FunctionType, seen: dict[int, Any]) -> Iterator[bytes]:
    """The text of a `def`; the bytecode of a lambda, whose line has more than itself, and of what
    has no text.
    """
    if function.__name__ != "<lambda>":
        with suppress(OSError):
            yield getsource(function).encode()
            return
    yield from bytecode(function.__code__, seen)


def bytecode(code: CodeType, seen: dict[int, Any]) -> Iterator[bytes]:
    """The instructions, and the names and constants that these count."""
    yield code.co_code
    yield " ".join([*code.co_names, *code.co_varnames]).encode()
    for constant in code.co_consts:
        yield from (
            bytecode(constant, seen) if isinstance(constant, CodeType) else parts(constant, seen)
        )


def names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a function, and in the functions and comprehensions within
    it.
    """
    within = (names_in(one) for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*within)
