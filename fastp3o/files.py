"""Files and folders that are complete or absent at every instant, also after the power has failed.

They are written under a temporary name beside their place, synced and renamed; what they replace is
removed last.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from fastp3o.errors import UserError

UNFINISHED, REPLACED = "unfinished", "replaced"
LEFTOVER = re.compile(rf"(?P<name>.+)\.(?P<kind>{UNFINISHED}|{REPLACED})-[0-9a-f]{{12}}")


def temporary_sibling(path: Path, kind: str = UNFINISHED) -> Path:
    """A new name in the folder of `path`."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def from_here(path: Path) -> Path:
    """The path as messages have it: from the working directory, if it lies in there."""
    with suppress(ValueError, OSError):
        return path.relative_to(Path.cwd())
    return path


def read_text(path: str, flag: str) -> str:
    """The text of a file that a flag names. Raises UserError if it cannot be read, or has none."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--{flag} {path} cannot be read: {error}") from error
    if not text.strip():
        raise UserError(f"--{flag} {path} has no text")
    return text


def write_file(path: Path, content: str | bytes | Iterable[bytes | memoryview]) -> str:
    """Writes a whole file, replacing an existing one. Returns its SHA-256. content: text, bytes, or
    blocks of bytes, of which one at a time is in memory.
    """
    content = content.encode() if isinstance(content, str) else content
    digest = hashlib.sha256()
    with whole_file(path) as file:
        for block in [content] if isinstance(content, bytes) else content:
            file.write(block)
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives an OSError without a file, as writing to a full disk raises it, this one."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write bytes to. It replaces an existing one once the block has ended without an
    error.
    """
    unfinished = temporary_sibling(path)
    try:
        with naming(path), unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder and its missing parents, and syncs each: a file may be lost with its folder."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(exist_ok=True)
        with suppress(PermissionError):  # a folder that may be written to but not read
            sync(path.parent)


def make_unfinished(folder: Path) -> Path:
    """A new folder under a temporary name, for `move_into_place`."""
    unfinished = temporary_sibling(folder)
    make_folder(folder.parent)
    unfinished.mkdir()
    return unfinished


def place_of(unfinished: Path) -> Path | None:
    """The place of a file or folder with a name of `temporary_sibling`; None for another name."""
    leftover = LEFTOVER.fullmatch(unfinished.name)
    return (
        unfinished.with_name(leftover["name"])
        if leftover and leftover["kind"] == UNFINISHED
        else None
    )


def move_into_place(unfinished: Path, folder: Path) -> None:
    """Renames a written folder, replacing an existing one."""
    # safetensors makes files for their owner only; the others have the mode that the umask gives.
    for file in unfinished.rglob("*.safetensors"):
        file.chmod(next(file.parent.glob("*.json")).stat().st_mode)
    for path in unfinished.rglob("*"):
        sync(path)
    sync(unfinished)
    replaced = temporary_sibling(folder, REPLACED)
    if folder.exists() or folder.is_symlink():
        folder.rename(replaced)
    unfinished.rename(folder)
    sync(folder.parent)
    if replaced.exists() or replaced.is_symlink():
        remove(replaced)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    except OSError as error:
        if not (path.is_dir() and error.errno == errno.EINVAL):
            # Some network file systems sync no folders.
            raise
    finally:
        os.close(descriptor)


def clear_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Removes unfinished writes of earlier processes. A file that was about to be replaced, and
    whose successor is not there yet, gets its name back. folder: no other process writes to it.
    names: of files and folders; others stay.
    """
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        leftover = LEFTOVER.fullmatch(path.name)
        if leftover is None or not names.fullmatch(leftover["name"]):
            continue
        place = folder / leftover["name"]
        if leftover["kind"] == REPLACED and not place.exists():
            path.rename(place)
        else:
            remove(path)


def remove(path: Path) -> None:
    """Removes a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


# --- lines of JSON, which are appended and never changed ------------------------------------------


def append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Adds a line for each record. Raises ValueError, with nothing written, if a number is not
    finite.
    """
    lines = "".join(
        json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in records
    )
    with naming(path), path.open("ab") as file:
        # Half a surrogate pair, which has no UTF-8, is escaped as JSON escapes it.
        file.write(lines.encode(errors="backslashreplace"))


def lines(path: Path) -> Iterator[bytes]:
    """The lines of a log, none if it is not there."""
    if path.exists():
        with path.open("rb") as file:
            yield from file
