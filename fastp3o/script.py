"""Runs a script's main function: a user's mistake ends in one line, a bug in a traceback."""

import sys
from collections.abc import Callable

from fastp3o.errors import UserError

DEBUG = "--debug"
DEBUG_HELP = f"{DEBUG} shows the traceback of an error that is otherwise shown in one line."


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main function. Exits with status 1 and one line after a UserError or an OSError.

    `--debug` among the arguments, which main does not see, keeps the traceback.
    """
    debug = DEBUG in sys.argv
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != DEBUG]
    try:
        main()
    except (UserError, OSError) as error:
        if debug:
            raise
        raise SystemExit(f"error: {' '.join(str(error).split()) or type(error).__name__}") from error
