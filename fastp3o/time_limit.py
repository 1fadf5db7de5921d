"""Ends code of others that takes too long: chat templates, and users' functions."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLongError(BaseException):
    """Code reached its time limit. This is not an Exception, so that the code does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TookTooLongError after this many seconds in the context: where the code is, and at its end if it has
    caught that.

    The clock is a signal, SIGALRM, so it stops only Python code in the main thread; other threads have no limit, and
    code that sets an alarm of its own has that one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    rung = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        rung = True
        raise TookTooLongError

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        # A handler that the code has installed to stay is not ours to remove.
        if signal.getsignal(signal.SIGALRM) is stop:
            signal.signal(signal.SIGALRM, handler)
    if rung:
        raise TookTooLongError
