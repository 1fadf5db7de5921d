"""Ends Python code in the main thread that takes longer than it may."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType


class TookTooLongError(BaseException):
    """Code reached its time limit, the argument, in seconds. No Exception, so that the code does
    not catch it.
    """


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLongError after this many seconds in the context: where the code is, and at its
    end if it has caught that. The clock is a signal, SIGALRM, so it stops only Python code in the
    main thread; other threads have no limit, and code that sets an alarm of its own has that one.
    An outer limit waits for the end of an inner one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung = True
        raise TookTooLongError(seconds)

    handler, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    outer, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        # A handler that the code has installed to stay is not ours to remove.
        if signal.getsignal(signal.SIGALRM) is ring:
            signal.signal(signal.SIGALRM, handler)
        signal.setitimer(
            signal.ITIMER_REAL, outer and max(outer + began - time.monotonic(), 1e-6), interval
        )
    if rung:
        raise TookTooLongError(seconds)


def limited(seconds: float | None) -> AbstractContextManager[None]:
    """The time limit of a user's code. There is none beside an alarm of the program's own."""
    free = signal.getsignal(signal.SIGALRM) in (signal.SIG_DFL, signal.SIG_IGN)
    return time_limit(seconds) if seconds and free else nullcontext()
