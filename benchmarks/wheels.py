"""Wheels, whole or in pieces, to a folder of whole ones.

    python benchmarks/wheels.py FOLDER FILE ...

Of NAME.whl the pieces are NAME.whl.piece-aa, NAME.whl.piece-ab, ..., in this order. A wheel of
which a piece is missing is said and left out: what needs it is then absent.
"""

import os
import shutil
import sys
import zipfile
import zlib
from pathlib import Path

PIECE = ".piece-"


def gather(folder: Path, files: list[Path]) -> None:
    pieces: dict[str, list[Path]] = {}
    for file in sorted(files, key=lambda file: file.name):
        pieces.setdefault(file.name.partition(PIECE)[0], []).append(file)
    for name, parts in pieces.items():
        if len(parts) == 1 and parts[0].name == name:
            os.symlink(parts[0].resolve(), folder / name)
            continue
        with (folder / name).open("wb") as wheel:
            for part in parts:
                with part.open("rb") as piece:
                    shutil.copyfileobj(piece, wheel)
        if not is_whole(folder / name):
            print(f"{name}: pieces are missing, it is left out", file=sys.stderr)
            (folder / name).unlink()


def is_whole(wheel: Path) -> bool:
    """By the sums of its files: the list of them at the end does not see a piece that is missing in
    the middle.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError):
        return False


if __name__ == "__main__":
    gather(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:] if ".whl" in name])
