"""Errors about data that cannot be used. They name the place, what was expected and what was found."""

import unicodedata
from dataclasses import dataclass

from fastp3o.errors import UserError


class DataError(UserError):
    """Data that cannot be used. The message names the file or hub name and, if known, the record
    and the field.
    """


class RecordError(Exception):
    """One record cannot be used. The loader turns this error into a DataError, or counts it."""

    def __init__(self, field: str | None, expected: str, got: object) -> None:
        super().__init__(field, expected, got)
        self.field = f"field '{field}': " if field else ""
        self.expected = expected
        self.got = got.words if isinstance(got, Found) else describe(got)

    def __str__(self) -> str:
        return f"{self.reason}, got {self.got}"

    @property
    def reason(self) -> str:
        """The problem without what was found, so that records with the same problem count as one
        reason.
        """
        return f"{self.field}expected {self.expected}"

    def at(self, file: str, number: int) -> DataError:
        return DataError(
            f"{file} record {number}{' ' if self.field else ': '}{self.reason}, got {self.got}"
        )


@dataclass(frozen=True, repr=False)
class Found:
    """Words for a value that was found, in place of those of `describe`."""

    words: str

    def __repr__(self) -> str:
        return repr(self.words)


MISSING = Found("nothing: the field is missing")


def describe(value: object) -> str:
    """A short description of a value of any type, never the whole value."""
    match value:
        case None:
            return "null"
        case str():
            return (
                "an empty string"
                if value == ""
                else "only white space"
                if is_blank(value)
                else "a string"
            )
        case bool():
            return "true" if value else "false"
        case int() | float() if not abs(value) >= 1e12:
            return f"the number {value:.12g}"
        case int() | float():
            return "a number of more than twelve digits"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {field_names(value)}"
        case _:
            return f"a {type(value).__name__}"


def is_blank(value: str) -> bool:
    """Whether a text has nothing to read: only white space and characters that are not seen, such
    as U+200B.
    """
    return all(
        character.isspace() or unicodedata.category(character) == "Cf" for character in value
    )


def field_names(fields: object) -> str:
    """The names of an object's fields, at most twelve of them."""
    names = [str(name)[:40] for name in fields]  # type: ignore[attr-defined]
    if not names:
        return "no fields"
    return (
        f"the field{'s' * (len(names) > 1)} "
        + ", ".join(names[:12])
        + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    )
