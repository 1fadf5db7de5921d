"""Damages that a disk does to a file."""

import os
import random
from collections.abc import Callable
from pathlib import Path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[random.Random(path.name).randrange(len(content))] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped": flip,
    "cut": lambda path: os.truncate(path, path.stat().st_size * 2 // 3),
    "zeros": lambda path: path.write_bytes(path.read_bytes() + b"\0" * 512),
    "gone": Path.unlink,
}
