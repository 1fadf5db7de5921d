"""Users' code runs: it may change the working directory, and must not end the process."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from fastp3o.calls.event_loop import LoopThread

end_process = os._exit  # while users' code runs, `os._exit` is `end_by_error`


class Directory:
    """The working directory, which users' code may change for the whole process. A thread that puts
    it back, while another's code has changed it for a while, takes it from that. So the main thread
    alone puts it back, to what it was when no thread ran users' code, and only when no other thread
    does. A thread that is left behind counts no more.

    holders, running: threads, each as often as it has begun.
    """

    def __init__(self) -> None:
        self.lock, self.here = threading.Lock(), threading.local()
        self.holders, self.running = list[threading.Thread](), list[threading.Thread]()
        self.before = self.left = self.now()

    @staticmethod
    def now() -> str | None:
        with suppress(OSError):  # the folder was removed: nothing is relative to it any more
            return os.getcwd()
        return None

    def hold(self, thread: threading.Thread) -> None:
        """Until `release`, the directory counts as the run's, unless users' code has left it
        behind.
        """
        with self.lock:
            if not self.holders and (now := self.now()) != self.left:
                self.before = now
            self.holders.append(thread)

    def release(self, thread: threading.Thread) -> None:
        with self.lock:
            if thread in self.holders:
                self.holders.remove(thread)
                self.left = self.now()

    def leave_behind(self, thread: threading.Thread) -> None:
        with self.lock:
            self.holders = [other for other in self.holders if other is not thread]
            self.running = [other for other in self.running if other is not thread]
            if not self.running:
                os._exit = end_process

    @contextmanager
    def changeable(self) -> Iterator[None]:
        """Users' code runs in this thread."""
        thread = threading.current_thread()
        with self.lock:
            self.put_back()
            self.running.append(thread)
            os._exit = end_by_error
        outer, self.here.runs = self.runs_here, True
        try:
            yield
        finally:
            self.here.runs = outer
            with self.lock:
                if thread in self.running:
                    self.running.remove(thread)
                self.put_back()
                if not self.running:
                    os._exit = end_process

    @property
    def runs_here(self) -> bool:
        return getattr(self.here, "runs", False)

    def put_back(self) -> None:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and self.before is not None and not self.running:
            with suppress(OSError):
                os.chdir(self.before)


directory = Directory()


def end_by_error(status: int) -> NoReturn:
    """What users' code gets as `os._exit`, which ends a run without a word, and with status 0 as if
    it were finished: raises SystemExit. In other threads the process ends.
    """
    if directory.runs_here or isinstance(threading.current_thread(), LoopThread):
        raise SystemExit(status)
    end_process(status)


def begin_fork() -> None:
    """A process that users' code has forked ends as it wants to, and has locks that nobody holds."""
    os._exit, directory.lock = end_process, threading.Lock()


os.register_at_fork(after_in_child=begin_fork)


@contextmanager
def restored() -> Iterator[None]:
    """Users' code runs in this thread; the working directory that it changes is put back."""
    thread = threading.current_thread()
    directory.hold(thread)
    try:
        with directory.changeable():
            yield
    finally:
        directory.release(thread)
