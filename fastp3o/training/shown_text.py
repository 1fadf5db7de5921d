"""Texts as a terminal can show them: what a model writes may hold control characters."""


def visible(text: str) -> str:
    """The text with line ends, and all else that cannot be printed as an escape such as \\x1b."""
    return "".join(character if is_shown(character) else escaped(character) for character in text)


def is_shown(character: str) -> bool:
    return character.isprintable() or character == "\n"


def escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def prompt_end(prompt: str, characters: int = 120) -> str:
    """The end of a prompt, on one line."""
    line = " ".join(prompt.split())
    return line if len(line) <= characters else "…" + line[-characters:]
