"""The folder of a run: its lock, its configuration, and its clean-up before a resumed run
continues.
"""

import errno
import fcntl
import os
import re
import socket
from pathlib import Path

import yaml
from accelerate import Accelerator
from accelerate.utils import gather_object

from fastp3o.config import RunConfig
from fastp3o.errors import UserError
from fastp3o.files import (
    LEFTOVER,
    UNFINISHED,
    clear_leftovers,
    from_here,
    make_folder,
    remove,
    temporary_sibling,
    write_file,
)
from fastp3o.rewards.config import VERDICTS
from fastp3o.run import names
from fastp3o.run.fingerprints import MODELS, names_in
from fastp3o.run.manifest import MANIFEST
from fastp3o.runtime.processes import on_main_process
from fastp3o.sources import InMemory

OURS = re.compile(
    rf"{names.CONFIG}|{'|'.join(names.LOGS)}|{MANIFEST}|{names.REFERENCE}|{names.SAMPLES}|{names.KEPT}|"
    rf"{names.PROGRESS}|{names.REPORT}|{names.FINISHED_MODEL}|{names.ADAPTER}|{names.BEST_MODEL}|"
    r"checkpoint-\d{6,}|stopped-in-\d{6,}"
)

# All that a run writes, and what there is only once it has made a step or a sample.
WRITTEN = re.compile(
    rf"{OURS.pattern}|{names.LOCK}|{names.STATES}|trackers|{VERDICTS}|verdicts-\d+\.jsonl"
)
MADE = {
    names.STATES,
    names.FINISHED_MODEL,
    names.ADAPTER,
    names.BEST_MODEL,
    names.SAMPLES,
    *names.LOGS,
}

# This process's locks by folder as it is named: a link may lead elsewhere later. They are global
# because something may still hold the objects of a run that failed.
locks: dict[Path, int] = {}


def check_output_dir(accelerator: Accelerator, config: RunConfig) -> None:
    """Checks the folder before anything is loaded, and leaves nothing. Raises FileExistsError if it
    holds a run that this one does not resume, or files that are not a run's; UserError if a model
    that the run starts from lies in it, or if it is not the same folder for all processes.
    """
    on_main_process(accelerator, lambda: require_usable(config))
    if accelerator.num_processes == 1:
        return
    folder = Path(config.output_dir)
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    token = on_main_process(accelerator, lambda: temporary_sibling(place / names.CONFIG))
    on_main_process(accelerator, token.touch)
    seen = gather_object([(token.exists(), f"{folder.absolute()} on {socket.gethostname()}")])
    on_main_process(accelerator, token.unlink)
    if others := sorted({place for sees, place in seen if not sees}):
        shared = "name a folder on a file system that all nodes share"
        raise UserError(
            f"--output_dir: {', '.join(others)} is not {seen[0][1]}, where process 0 writes: {shared}"
        )


def require_usable(config: RunConfig) -> None:
    folder = Path(config.output_dir)
    for option in MODELS:
        for name in names_in(config.values(), option):
            path = Path(str(name))
            inside = path.exists() and path.resolve().is_relative_to(folder.resolve())
            if inside and not isinstance(name, InMemory):
                place = f"--output_dir {folder}, where this run writes its own models"
                raise UserError(f"--{option} {name} lies in {place}: name another --output_dir")
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(f"--output_dir {folder} is a file: name another --output_dir")
    held = sorted(path.name for path in folder.iterdir() if not LEFTOVER.fullmatch(path.name))
    # A removed lock is made again.
    is_a_run = names.LOCK in held or {names.CONFIG, names.STATES} <= set(held)
    if held and not is_a_run:
        other = f"is not empty and was not written by this version of fastp3o ({held[0]})"
        raise FileExistsError(f"--output_dir {folder} {other}: name a new or empty folder")
    if config.overwrite:
        if others := [name for name in held if not WRITTEN.fullmatch(name)]:
            raise FileExistsError(
                f"--overwrite: no run has written {others[0]} in {folder}: move it away"
            )
    elif not config.resume and any(
        name in MADE or name.startswith(("checkpoint-", "stopped-in-")) for name in held
    ):
        remedies = (
            "continue it with --resume, remove it with --overwrite, or name another --output_dir"
        )
        raise FileExistsError(f"{folder} holds a run already: {remedies}")


def claim(accelerator: Accelerator, config: RunConfig) -> Path:
    """Makes the folder and locks it, until the process ends or `release` is called. Raises what
    `check_output_dir` does, and FileExistsError if another process trains in it.
    """
    folder = config.folder

    def make_and_lock() -> None:
        require_usable(config)
        make_folder(folder)
        lock(folder)
        try:
            require_usable(config)
            if config.overwrite:
                for path in folder.iterdir():
                    if path.name != names.LOCK:
                        remove(path)
        except BaseException:
            release(folder)
            raise

    on_main_process(accelerator, make_and_lock)
    return folder


def lock(folder: Path) -> None:
    release(folder)
    descriptor = os.open(folder / names.LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            holder = os.read(descriptor, 1000).decode(errors="replace").strip()
            os.close(descriptor)
            raise FileExistsError(
                f"another process trains in {from_here(folder)} ({holder}): wait for it"
            ) from error
        lacks = f"its file system has no locks ({error.strerror})"
        print(f"{from_here(folder)}: {lacks}: train there in one process at a time")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    locks[folder.absolute()] = descriptor


def require_claimed(folder: Path) -> None:
    """Raises FileNotFoundError if the locked folder is gone: unmounted, replaced or removed while
    the run trains.
    """
    descriptor = locks.get(folder.absolute())
    if descriptor is None:
        return
    try:
        same = os.path.samestat(os.fstat(descriptor), os.stat(folder / names.LOCK))
    except FileNotFoundError:
        same = False
    if not same:
        gone = f"{from_here(folder)} is no longer the folder in which this run began"
        raise FileNotFoundError(f"{gone}: bring it back and --resume")


def release(folder: Path) -> None:
    descriptor = locks.pop(folder.absolute(), None)
    if descriptor is not None:
        os.close(descriptor)


def keep_newest(folder: Path, count: int) -> None:
    """Removes all checkpoints but the newest ones. count: how many stay; 0: all."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if OURS.fullmatch(path.name)]
    checkpoints.sort(key=lambda path: int(path.name.partition("-")[2]))
    for checkpoint in checkpoints[:-count] if count else []:
        removed = checkpoint.rename(temporary_sibling(checkpoint, UNFINISHED))
        remove(removed)


def write_config(folder: Path, config: RunConfig) -> None:
    """Writes options for commands to read again, without None and without `overwrite`, which would
    remove the run.
    """
    options = {
        name: value
        for name, value in config.plain().items()
        if value is not None and name != "overwrite"
    }
    write_file(folder / names.CONFIG, yaml.safe_dump(options, sort_keys=False))


def clear_away(folder: Path) -> None:
    """Removes unfinished writes of earlier processes of this run."""
    for place in (folder, *folder.glob("stopped-in-*")):
        clear_leftovers(place, OURS)
