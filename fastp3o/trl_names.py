"""Hints for a name that no option has: what TRL's users call fastp3o's options, by a page's table;
the nearest.
"""

import re
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path

PAGE = Path(__file__).parent / "training" / "coming_from_trl.md"


def trl_names() -> dict[str, list[str]]:
    """The options that stand for TRL's names, of which a configuration has one; or, with a space,
    what to say.
    """
    _, table, *_ = PAGE.read_text(encoding="utf-8").split("```")
    rows = (line.split(maxsplit=1) for line in table.strip().splitlines())
    return {name: re.split("(?<!,) or ", choices) for name, choices in rows}


def hint(name: str, options: Collection[str]) -> str:
    """The advice for an unknown name, as the end of a message; "" if nothing is near. options:
    those of the configuration. Names of options are written as flags.
    """
    known = trl_names().get(name, [])
    chosen = next((choice for choice in known if " " in choice or choice in options), None)
    if chosen is None:
        initials = [
            option for option in options if "".join(word[0] for word in option.split("_")) == name
        ]
        near = initials[:1] or get_close_matches(name, options, n=1, cutoff=0.8)
        return f"; the nearest one is --{near[0]}" if near else ""
    first = chosen.split()[0].rstrip(",")
    return f"; TRL's {name} is {'--' * (first in options)}{chosen} here"
