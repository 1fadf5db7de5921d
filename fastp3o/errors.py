"""The error that a user can act on."""


class UserError(ValueError):
    """Input that cannot be used, or a run that cannot go on: the message says what to change.

    Scripts show it on one line. Any other exception except OSError is a bug and keeps its traceback.
    """
