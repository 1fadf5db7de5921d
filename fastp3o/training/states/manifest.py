"""What a state is of, and whether it is whole: manifest.json, written last, has a checksum of every file and itself."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastp3o.training.durable import write_file

MANIFEST = "manifest.json"
VERSION = 1


class CorruptStateError(ValueError):
    """A state is not what its manifest says. `str` is the reason, without the state's name."""


@dataclass(frozen=True)
class Manifest:
    """What a state is of.

    step: of the loop, whose work is in it. evaluated: whether that step's evaluation had been made. processes: that
    wrote it. config: the run's configuration. fingerprints: hashes of what the configuration names, see
    `fingerprints.py`. checksums: SHA-256 of each of its files.
    """

    step: int
    evaluated: bool
    processes: int
    config: dict[str, Any]
    fingerprints: dict[str, str]
    checksums: dict[str, str]

    def write(self, folder: Path) -> None:
        content = {"version": VERSION, **asdict(self)}
        write_file(folder / MANIFEST, json.dumps({**content, "sha256": checksum_of(content)}, indent=1))


def read_manifest(folder: Path) -> Manifest:
    """Raises CorruptStateError where there is no whole one."""
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        expected = content.pop("sha256")
        version, fields = content["version"], {k: v for k, v in content.items() if k != "version"}
        manifest = Manifest(**fields)
    except OSError as error:
        raise CorruptStateError(f"{MANIFEST} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptStateError(f"{MANIFEST} is damaged") from error
    if version != VERSION:
        raise CorruptStateError(f"{MANIFEST} is of version {version}, and this fastp3o reads version {VERSION}")
    if checksum_of(content) != expected:
        raise CorruptStateError(f"{MANIFEST} is damaged: its checksum is another")
    return manifest


def files_of(folder: Path) -> list[str]:
    """The files that a manifest in this folder must list."""
    return sorted(path.name for path in folder.iterdir() if path.name != MANIFEST)


def require_files(folder: Path, manifest: Manifest) -> None:
    """Raises CorruptStateError where a file is missing, or there is one that the run did not write."""
    present = set(files_of(folder))
    for what, names in (
        ("is missing", manifest.checksums.keys() - present),
        ("is not the run's", present - manifest.checksums.keys()),
    ):
        if names:
            raise CorruptStateError(f"{min(names)} {what}")


def checksum(path: Path) -> str:
    """Raises OSError, with the file's name, where it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def checksum_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
