"""Hints for a name that no option has: what TRL's users call fastp3o's options, by a page's table;
the nearest.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

NOTHING: Mapping[str, str] = MappingProxyType({})
PAGE = Path(__file__).parent / "training" / "coming_from_trl.md"


def trl_names() -> dict[str, list[str]]:
    """The options that stand for TRL's names, of which a configuration has one, each with what to
    say of it after a comma or a colon; or, with a colon, why there is none.
    """
    _, table, *_ = PAGE.read_text(encoding="utf-8").split("```")
    names: dict[str, list[str]] = {}
    for line in table.strip().splitlines():
        name, choices = line.split(maxsplit=1)
        names.setdefault(name, []).extend(re.split("(?<!,) or ", choices))
    return names


def hint(name: str, options: Collection[str], instead: Mapping[str, str] = NOTHING) -> str:
    """The advice for an unknown name, as the end of a message; "" if nothing is near. options:
    those of the configuration. instead: what it says of names that it does without. Names of
    options are written as flags.
    """
    if name in instead:
        return f"; {instead[name]}"
    for choice in trl_names().get(name, []):
        option = choice.split()[0].rstrip(",")
        if option in options or ":" in choice.partition(",")[0]:
            [(what, more)] = re.findall("^([^,:]*)(.*)$", choice)
            return f"; TRL's {name} is {'--' * (option in options)}{what} here{more}"
    initials = [
        option for option in options if "".join(word[0] for word in option.split("_")) == name
    ]
    near = initials[:1] or get_close_matches(name, options, n=1, cutoff=0.8)
    return f"; the nearest one is --{near[0]}" if near else ""


def with_hints(
    unknown: Sequence[str], options: Collection[str], instead: Mapping[str, str] = NOTHING
) -> str:
    """Unknown names, each with what is meant in its place."""
    hints = [hint(name.removeprefix("--"), options, instead) for name in unknown]
    if len(unknown) == 1:
        return unknown[0] + hints[0]
    parts = zip(unknown, hints, strict=True)
    return ", ".join(f"{name} ({what[2:]})" if what else name for name, what in parts)
