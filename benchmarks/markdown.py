"""Tables in Markdown, and the generated sections of pages: between <!-- name --> and <!-- /name
-->.
"""

import textwrap
from pathlib import Path

WIDTH = 120


def markdown(lines: list[list[str]]) -> str:
    """A table. Header first."""
    header, *rest = lines
    lines = [header, ["---"] * len(header), *rest]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def bullet(text: str) -> str:
    return textwrap.fill(
        f"- {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def between_markers(text: str, name: str, section: str) -> str:
    """The text with this section, in lines of its own or within one, as its markers are.

    Raises ValueError where there are none, or where a line begins with a section: Markdown would
    take it for HTML.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the text has no {begin} and {end} to write between")
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    own_lines = text[len(before) :].startswith("\n")
    line = before.removesuffix(begin).rpartition("\n")[2]
    if not own_lines and not line.strip(" -*"):
        raise ValueError(f"{begin} begins a line, and its section does not end it")
    return before + (f"\n{section}\n" if own_lines else section) + after


def write_between(path: Path, name: str, section: str) -> None:
    path.write_text(between_markers(path.read_text(), name, section))
