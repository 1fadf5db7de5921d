"""Runs a command's main function: a user's mistake ends in one line, a bug in a traceback."""

import os
import sys
from collections.abc import Callable
from io import TextIOWrapper

from fastp3o.errors import UserError, visible

DEBUG = "--debug"
DEBUG_HELP = f"{DEBUG} shows the traceback of an error that is otherwise shown in one line."
INTERRUPTED = 130  # as shells say it: 128 plus SIGINT's number
# What torch's allocator of the CPU and gloo say; both raise a bare RuntimeError.
NO_MEMORY = ("can't allocate memory", "not enough memory")
PEER_ENDED = ("Connection closed by peer", "Connection reset by peer")


def run_script(main: Callable[[], None]) -> None:
    """Runs a command's main function. Exits with status 1 and one line after a UserError, an
    OSError, out of memory and after the end of another process of the run; with 130 after an
    interrupt. `--debug` among the arguments, which main does not see, keeps the traceback.
    """
    UserError.names_flags = True
    let_segments_grow()
    debug = DEBUG in sys.argv
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != DEBUG]
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A response may hold any character, and a terminal may not.
            stream.reconfigure(errors="backslashreplace")
    try:
        main()
    except (Exception, KeyboardInterrupt) as error:
        line = None if debug else one_line(error)
        if line is None:
            raise
        if isinstance(error, BrokenPipeError):
            # What stdout still holds would fail a second time as Python exits.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, KeyboardInterrupt):
            print(line, file=sys.stderr)
            raise SystemExit(INTERRUPTED) from error
        raise SystemExit(line) from error


def let_segments_grow() -> None:
    """Asks torch's allocator of the GPU for segments that grow, unless the environment has settings
    for it. It reads them as CUDA starts, and has no use for later ones.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        # Rows differ in length, and so do tensors: in segments of fixed sizes they would leave
        # gaps.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def one_line(error: BaseException) -> str | None:
    """The line that stands for an error in place of its traceback; None for a bug."""
    line = visible(" ".join(str(error).split()))
    if isinstance(error, UserError | OSError):
        return f"error: {line or type(error).__name__}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    # torch's own class by its name: a script that says no more than its --help does not import
    # torch.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or any(text in line for text in NO_MEMORY):
        return f"error: out of memory; fastp3o memory shows what a run takes: {line or type(error).__name__}"
    if "gloo" in line and any(text in line for text in PEER_ENDED):
        return f"error: another process of this run failed, and its message says why: {line}"
    return None
