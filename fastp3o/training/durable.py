"""Files and folders that are complete or absent at every instant, also after the power has failed.

They are written beside their place under a name that nothing else has, synced to the disk, and renamed; what they
replace goes last.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED, REPLACED = "unfinished", "replaced"
LEFTOVER = re.compile(rf"(?P<name>.+)\.(?P<kind>{UNFINISHED}|{REPLACED})-[0-9a-f]{{12}}")


def beside(path: Path, kind: str = UNFINISHED) -> Path:
    """A new name next to `path`."""
    return path.with_name(f"{path.name}.{kind}-{secrets.token_hex(6)}")


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a whole file, in place of the one that is there."""
    with whole_file(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write bytes to, in place of the one that is there once the block has ended without an error."""
    unfinished = beside(path)
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder, and those above it that are missing: what is synced in one may be gone with the folder itself."""
    for path in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        path.mkdir(exist_ok=True)
        with suppress(PermissionError):  # of a folder that may be written to and not read
            sync(path.parent)


def move_into_place(unfinished: Path, folder: Path) -> None:
    """Renames a folder that is written, in place of the one that is there."""
    for path in unfinished.rglob("*"):
        sync(path)
    sync(unfinished)
    replaced = beside(folder, REPLACED)
    if folder.exists():
        folder.rename(replaced)
    unfinished.rename(folder)
    sync(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def clear_leftovers(folder: Path, names: re.Pattern[str]) -> None:
    """Removes what writes of earlier processes have left unfinished: names of ours alone, in a folder that no other
    process writes to. What was about to be replaced, with nothing in its place yet, gets its name back.

    names: of the files and folders that are written here.
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
    """Removes a file or a folder of ours."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
