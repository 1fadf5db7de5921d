"""What the name of a reward says it is."""

import os


def reward_names(names: str) -> list[str]:
    """Splits the names of several rewards, separated by commas; the name of a path that exists may hold commas."""
    if not names:
        return []
    return [names] if os.path.exists(names) else [name.strip() for name in names.split(",")]


def is_endpoint(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def is_function(name: str) -> bool:
    """Whether it is one of a Python function, as module:function, rather than of a model."""
    return ":" in name and not is_endpoint(name) and not os.path.exists(name)
