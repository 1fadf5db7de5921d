"""The error that a user can act on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

LONGEST = 10_000  # characters of others' messages that are shown


class UserError(ValueError):
    """Input that cannot be used, or a run that cannot continue: the message says what to change.

    Messages are written with flags, as commands name options. Elsewhere `str` names them as Python
    has them. Scripts show it on one line. Any other exception except OSError is a bug and keeps its
    traceback.
    """

    names_flags = False  # set by a command, for its process

    def __str__(self) -> str:
        message = super().__str__()
        return message if UserError.names_flags else as_arguments(message)


class MissingPackageError(UserError, ImportError):
    """A package is not installed that the trainer needs and the losses do not."""


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Around imports of the trainer: the error for a package that is missing says what installs it."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", "fastp3o", "fastp3o_kernels"):
            raise
        remedy = "install fastp3o with its extra, such as pip install '.[trainer]' in a clone"
        raise MissingPackageError(
            f"fastp3o's trainer needs {missing}, which is not installed: {remedy}"
        ) from None


def visible(text: str) -> str:
    """The text as a terminal can show it: control characters are escapes such as \\x1b."""
    return "".join(
        c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text
    )


def text_of(error: BaseException) -> str:
    """The message of an exception that users' code raised, as a terminal can show it."""
    try:
        said = str(error)
        return visible(said[:LONGEST]) + "…" * (len(said) > LONGEST)
    except BaseException:  # it may raise SystemExit, too
        return "its own text cannot be made"


def shown(value: object) -> str:
    """A value that users' code returned, in at most 80 characters; its kind if it cannot be
    written.
    """
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"a {type(value).__name__}"


def as_arguments(message: str) -> str:
    """A message with `--learning_rate` as `learning_rate`."""
    return re.sub(r"--(?=[a-z])", "", message)
