"""A user's Python function, given by name."""

import importlib
import os
import sys
from collections.abc import Callable


def import_function(name: str, role: str) -> Callable:
    """The function that `name` says as `module:function`; modules of the current directory are found too.

    Args:
        name: module, as Python imports it, and function.
        role: what the function is for, in error messages ("reward function").

    Raises:
        ValueError: the name has another form, module or function do not exist, or it is no function.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"the {role} must be given as module:function, got {name!r}")
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot load the {role} {name!r}: {error}") from error
    finally:
        sys.path.remove(folder)
    if not callable(found):
        raise ValueError(f"cannot load the {role} {name!r}: it is a {type(found).__name__}, not a function")
    return found
