"""Runs a script's main function: a user's mistake ends in one line, a bug in a traceback, and printing ends nothing."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from fastp3o.errors import UserError, text_of, visible

DEBUG = "--debug"
DEBUG_HELP = f"{DEBUG} shows the traceback of an error that is otherwise shown in one line."
INTERRUPTED = 130  # as shells say it: 128 plus SIGINT's number
# What torch's allocator of the CPU and gloo say; both raise a bare RuntimeError.
NO_MEMORY = ("can't allocate memory", "not enough memory")
PEER_ENDED = ("Connection closed by peer", "Connection reset by peer")


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main function. Exits with status 1 and one line after a UserError, an OSError, for want of memory
    and after the end of another process of the run; with 130 after an interrupt. `--debug` among the arguments, which
    main does not see, keeps the traceback.
    """
    UserError.names_flags = True
    let_segments_grow()
    debug = DEBUG in sys.argv
    sys.argv[1:] = [argument for argument in sys.argv[1:] if argument != DEBUG]
    with lasting_output():
        try:
            main()
        except (Exception, KeyboardInterrupt) as error:
            line = None if debug else one_line(error)
            if line is None:
                raise
            if isinstance(error, KeyboardInterrupt):
                print(line, file=sys.stderr)
                raise SystemExit(INTERRUPTED) from error
            raise SystemExit(line) from error


def let_segments_grow() -> None:
    """Asks torch's allocator of the GPU for segments that grow, unless the environment has settings for it. It reads
    them as CUDA starts, and has no use for later ones.
    """
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # the older name
        # Rows differ in length, and so do tensors: in segments of fixed sizes they would leave gaps.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


def one_line(error: BaseException) -> str | None:
    """The line that stands for an error in place of its traceback; None for a bug."""
    line = visible(" ".join(str(error).split()))
    if isinstance(error, UserError | OSError):
        return f"error: {line or type(error).__name__}"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    # torch's own class by its name: a script that says no more than its --help does not import torch.
    out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    if out_of_memory or any(text in line for text in NO_MEMORY):
        return f"error: out of memory; scripts/memory.py shows what a run takes: {line or type(error).__name__}"
    if "gloo" in line and any(text in line for text in PEER_ENDED):
        return f"error: another process of this run failed, and its message says why: {line}"
    return None


@contextmanager
def lasting_output() -> Iterator[None]:
    """Drops what is printed inside, once standard output or error takes no more, and raises nothing."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w") as nowhere:
        # None: the file was closed from the start, or the program has no console.
        lasting = [LastingStream(nowhere if s is None else s, tells=s is sys.stdout) for s in before]
        sys.stdout, sys.stderr = cast(Any, lasting)
        try:
            yield
        finally:
            for stream in lasting:
                stream.flush()
            sys.stdout, sys.stderr = before


class LastingStream:
    """A text stream that outlives its file, such as a pipe that nobody reads, or a full disk. tells: on stderr."""

    def __init__(self, stream: TextIO | Any, *, tells: bool):
        self.stream, self.tells = stream, tells

    def write(self, text: str) -> int:
        try:
            self.attempt(lambda: self.stream.write(text))
        except UnicodeEncodeError:  # of a stream that is not UTF-8
            self.attempt(lambda: self.stream.write(text.encode("ascii", "backslashreplace").decode()))
        return len(text)

    def flush(self) -> None:
        self.attempt(lambda: getattr(self.stream, "flush", lambda: None)())  # a program's own stream may have none

    def isatty(self) -> bool:
        with suppress(Exception):  # ValueError: it was closed
            return self.stream.isatty()
        return False

    def attempt(self, action: Callable[[], object]) -> None:
        """Leads the file to nowhere if it fails, also for what is in the stream's buffer and is flushed at the exit."""
        try:
            action()
        except UnicodeEncodeError:
            raise
        except Exception as error:  # ValueError: the stream was closed; a program's own stream may raise anything
            with suppress(Exception):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
            if self.tells:
                self.tells = False
                reason = error.strerror if isinstance(error, OSError) else text_of(error)
                print(f"cannot write to stdout ({reason}); continuing without it", file=sys.stderr)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)
