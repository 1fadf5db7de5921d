"""The error that a user can act on."""

import re


class UserError(ValueError):
    """Input that cannot be used, or a run that cannot go on: the message says what to change.

    Messages are written with flags, as commands name options. Elsewhere `str` names them as Python has them.

    Scripts show it on one line. Any other exception except OSError is a bug and keeps its traceback.
    """

    names_flags = False  # set by a command, for its process

    def __str__(self) -> str:
        message = super().__str__()
        return message if UserError.names_flags else as_arguments(message)


def as_arguments(message: str) -> str:
    """A message with `--learning_rate` as `learning_rate`."""
    return re.sub(r"--(?=[a-z])", "", message)
