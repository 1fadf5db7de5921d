"""What is said about data that cannot be used: where it is, what was expected, what was found."""


class DataError(ValueError):
    """Data that cannot be used. The message names the file or hub name and, where known, the row and the field."""


class RowError(Exception):
    """Why one row cannot be used; the loader turns it into a DataError, or counts it."""

    def __init__(self, field: str | None, expected: str, got: object) -> None:
        super().__init__(field, expected, got)
        self.field = f"field '{field}': " if field else ""
        self.expected = expected
        self.got = got if isinstance(got, Found) else describe(got)

    @property
    def reason(self) -> str:
        """Without what was found, so that rows with the same problem count as one reason."""
        return f"{self.field}expected {self.expected}"

    def at(self, file: str, number: int) -> DataError:
        return DataError(f"{file} row {number}{' ' if self.field else ': '}{self.reason}, got {self.got}")


class Found(str):
    """Words that already say what was found, where the value itself says too little."""


MISSING = Found("nothing: the field is missing")


def describe(value: object) -> str:
    """A few words for a value of any type, never the value whole."""
    match value:
        case None:
            return "null"
        case str():
            return "an empty string" if value == "" else "only white space" if not value.strip() else "a string"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return f"the number {value:.6g}" if isinstance(value, float) else f"the number {shortened(value)}"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {named(value)}"
        case _:
            return f"a {type(value).__name__}"


def shortened(number: int) -> str:
    return str(number) if abs(number) < 10**12 else "of more than twelve digits"


def named(fields: object) -> str:
    """The names of columns or fields, the first few where there are many."""
    names = [str(name)[:40] for name in fields]  # type: ignore[attr-defined]
    if not names:
        return "no fields"
    return "the fields " + ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
