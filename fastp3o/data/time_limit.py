"""An end to Python code that does not end by itself, such as a template with loops in loops."""

import ctypes
import threading
import time

CHECKS = 20  # in the time that is allowed


class TookTooLongError(BaseException):
    """Raised wherever the code is at its time limit. Not an Exception, so that the code does not catch it."""


class TimeLimit:
    """As a context: TookTooLongError in the calling thread after so many seconds inside.

    A second thread watches, as a signal's handler could only be set in the main one, and only once. Code that stays
    within one C function is not stopped. One thread at a time can be inside.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.deadline: float | None = None
        self.lock = threading.Lock()
        self.watcher: threading.Thread | None = None

    def __enter__(self) -> None:
        with self.lock:
            self.caller, self.deadline = threading.get_ident(), time.monotonic() + self.seconds
        if self.watcher is None:
            self.watcher = threading.Thread(target=self.watch, name="time limit", daemon=True)
            self.watcher.start()

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.deadline = None

    def watch(self) -> None:
        while True:
            time.sleep(self.seconds / CHECKS)
            with self.lock:
                if self.deadline is not None and time.monotonic() > self.deadline:
                    self.deadline = None
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(self.caller), ctypes.py_object(TookTooLongError)
                    )
