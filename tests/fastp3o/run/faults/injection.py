"""Runs in child processes, of which one ends, is asked to stop or finds its disk full at a given
file-system call.
"""

import errno
import os
import random
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tqdm import tqdm

WRITES = ("os.mkdir", "os.rename", "os.truncate")
CALLS = ("open", *WRITES, "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree")
KILLED = 9
LONGEST = 60.0  # seconds from the start to the end of processes that wait for each other


def in_child(
    work: Callable[[], object], log: Path, prepare: Callable[[], object] = lambda: None
) -> int:
    """The exit status of a fork that does `work`; what it prints goes to `log`."""
    return wait_together([fork(work, log, prepare)])[0]


def fork(
    work: Callable[[], object], log: Path, prepare: Callable[[], object] = lambda: None
) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        # A forked process makes torch's threads anew at their first use, and two threads that do so
        # at once end it.
        torch.set_num_threads(torch.get_num_threads())
        # Forks share the semaphore of tqdm's lock: one that is killed while it has it would stop
        # all others.
        tqdm.set_lock(threading.RLock())
        prepare()
        work()
        status = 0
    except SystemExit as stopped:
        if isinstance(stopped.code, str):
            print(stopped.code, file=sys.stderr)
        else:
            status = stopped.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def fork_together(
    work: Callable, logs: Sequence[Path], prepare: Callable = lambda number: None
) -> list[int]:
    """Forks that do `work` with each other over gloo, as torchrun's workers; `prepare` has the
    number of each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def join(number: int) -> None:
        place = {
            "RANK": number,
            "LOCAL_RANK": number,
            "WORLD_SIZE": len(logs),
            "LOCAL_WORLD_SIZE": len(logs),
        }
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), ACCELERATE_USE_CPU="true")
        prepare(number)

    return [fork(work, log, lambda number=number: join(number)) for number, log in enumerate(logs)]


def wait_together(pids: Sequence[int], longest: float = LONGEST) -> list[int]:
    """The exit statuses of processes. Kills those that run longer than `longest` s, and raises
    TimeoutError.
    """
    deadline = time.monotonic() + longest
    statuses: dict[int, int] = {}
    while len(statuses) < len(pids):
        late = time.monotonic() > deadline
        for pid in set(pids) - statuses.keys():
            if late:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if late else os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        if late:
            raise TimeoutError(f"a process had not ended after {longest:.0f} s")
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1
    path.write_bytes(content)


# What a disk does to a file.
DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "zeros": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 512),
    "gone": Path.unlink,
}


class FileCalls:
    """Counts the calls of Python that touch a folder, os.fsync among them, and acts before the one
    of a number. stop_before: where SIGTERM comes. power: bytes that were not synced are lost by
    half when it ends. Nothing of it can be taken back: for a child.
    """

    def __init__(
        self,
        folder: Path,
        *,
        kill_before: int = 0,
        full_from: int = 0,
        stop_before: int = 0,
        power=False,
    ):
        self.folder = folder.resolve()
        self.kill_before, self.full_from, self.stop_before, self.power = (
            kill_before,
            full_from,
            stop_before,
            power,
        )
        self.count = 0
        self.synced: dict[str, int] = {}
        self.acting = False

    def install(self) -> None:
        sys.addaudithook(self.hook)
        fsync = os.fsync

        def counted(descriptor: int) -> None:
            self.call("os.fsync", False)
            fsync(descriptor)
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if path in self.synced:
                self.synced[path] = os.path.getsize(path)

        os.fsync = counted

    def hook(self, event: str, arguments: tuple) -> None:
        if self.acting or event not in CALLS:
            return
        name = arguments[0]
        if isinstance(name, int) or (
            len(arguments) > 1 and arguments[-1] not in (-1, None) and event == "os.remove"
        ):
            self.call(event, False)
            return
        path = os.path.abspath(os.fsdecode(name))
        if not Path(path).is_relative_to(self.folder):
            return
        is_write = event in WRITES or (
            event == "open" and bool(arguments[2] & (os.O_WRONLY | os.O_RDWR))
        )
        self.call(event, is_write)
        if event == "open" and is_write:
            self.synced.setdefault(path, os.path.getsize(path) if os.path.exists(path) else 0)
        if event == "os.rename":
            target = os.path.abspath(os.fsdecode(arguments[1]))
            moved = {
                p: s for p, s in self.synced.items() if p == path or p.startswith(path + os.sep)
            }
            self.synced = {p: s for p, s in self.synced.items() if p not in moved}
            self.synced |= {target + p.removeprefix(path): s for p, s in moved.items()}

    def call(self, event: str, is_write: bool) -> None:
        self.count += 1
        if self.full_from and self.count >= self.full_from and is_write:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.count == self.stop_before:
            os.kill(os.getpid(), signal.SIGTERM)
        if self.count == self.kill_before:
            self.acting = True
            if self.power:
                self.lose_what_is_not_synced()
            os._exit(KILLED)

    def lose_what_is_not_synced(self) -> None:
        for path, synced in self.synced.items():
            if os.path.exists(path):
                os.truncate(path, synced + (os.path.getsize(path) - synced) // 2)
