"""What a script does around its main function: a user's mistake ends in one line, a bug in a traceback."""

import dis
import sys
from collections.abc import Callable
from types import TracebackType

DEBUG = "--debug"
DEBUG_HELP = f"{DEBUG} shows the traceback of an error that is otherwise told in one line."


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main function. Exits with status 1 and one line where input cannot be used.

    `--debug` among the arguments, which main does not see, leaves the traceback.
    """
    debug = DEBUG in sys.argv
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != DEBUG]
    try:
        main()
    except Exception as error:
        if debug or not is_message(error):
            raise
        raise SystemExit(f"error: {one_line(error)}") from error


def is_message(error: Exception) -> bool:
    """Whether an error tells the user what to change: what the system refused, or what a `raise` of ours says.

    A ValueError from elsewhere, such as a zip of two lengths, is a bug.
    """
    if isinstance(error, OSError):
        return True
    return isinstance(error, ValueError | RuntimeError) and raised_by_us(error.__traceback__)


def raised_by_us(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is one of fastp3o or its kernels, or of a script, at a raise statement."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code, package = traceback.tb_frame.f_code, traceback.tb_frame.f_globals.get("__name__", "").partition(".")[0]
    return (
        package in ("fastp3o", "fastp3o_kernels", "__main__")
        and dis.opname[code.co_code[traceback.tb_lasti]] == "RAISE_VARARGS"
    )


def one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
