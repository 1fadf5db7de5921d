"""A state's manifest. It tells whether the state is whole, and which runs may continue from it.

manifest.json is written last, and has a checksum of every file and of itself. Until then each
process's files have one that is made in the same way, so that a state is known to be whole although
no process could say so.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fastp3o.config import RunConfig
from fastp3o.errors import UserError
from fastp3o.files import naming, write_file
from fastp3o.run.fingerprints import FUNCTION
from fastp3o.runtime.clock import Clock

MANIFEST = "manifest.json"
VERSION = 2


class CorruptStateError(UserError):
    """A state is not what its manifest says. `str` is the reason, without the state's name."""


class ResumeError(UserError):
    """A run cannot continue from its state with the configuration, data or models that it is given."""


@dataclass(frozen=True)
class Manifest:
    """A state's description. step: the last one whose work is in the state. evaluated: whether that
    step's evaluation was made. processes: how many wrote it. config: the run's configuration.
    fingerprints: hashes of what the configuration names, see `fingerprints.py`. checksums: SHA-256
    of each of its files. begun: the time of the run's first start, which chat templates read, in
    ISO 8601; "" in those that older versions wrote.
    """

    step: int
    evaluated: bool
    processes: int
    config: dict[str, Any]
    fingerprints: dict[str, str]
    checksums: dict[str, str]
    begun: str = ""

    def write(self, folder: Path, name: str = MANIFEST) -> None:
        content = {"version": VERSION, **asdict(self)}
        write_file(
            folder / name, json.dumps({**content, "sha256": content_checksum(content)}, indent=1)
        )


def part_name(process: int) -> str:
    """The name of the manifest of one process's files."""
    return f"manifest-{process:05}.json"


def read_unplaced(folder: Path) -> Manifest | None:
    """The manifest of a state that may not be whole yet: its own, or that of its processes' parts;
    None if a part or a file is missing.
    """
    try:
        if (folder / MANIFEST).exists():
            return read_manifest(folder)
        first = read_manifest(folder, part_name(0))
        parts = [read_manifest(folder, part_name(process)) for process in range(first.processes)]
        whole = replace(
            first,
            checksums={name: value for part in parts for name, value in part.checksums.items()},
        )
        require_files(folder, whole)
    except CorruptStateError:
        return None
    return whole


def read_manifest(folder: Path, name: str = MANIFEST) -> Manifest:
    """Reads a folder's manifest. Raises CorruptStateError if there is no whole one."""
    try:
        content = json.loads((folder / name).read_bytes())
        expected = content.pop("sha256")
        version, fields = content["version"], {k: v for k, v in content.items() if k != "version"}
        manifest = Manifest(**fields)
    except OSError as error:
        raise CorruptStateError(f"{name} cannot be read ({error.strerror})") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptStateError(f"{name} is damaged") from error
    if version != VERSION:
        raise CorruptStateError(
            f"{name} is of version {version}, and this fastp3o reads version {VERSION}"
        )
    if content_checksum(content) != expected:
        raise CorruptStateError(f"{name} is damaged: its checksum differs")
    return manifest


def first_start(folders: Iterable[Path]) -> Clock:
    """The clock of the run that wrote manifests in these folders, which all have it; that of now
    without one.
    """
    for folder in folders:
        manifest = read_unplaced(folder)  # who needs the state says what is wrong with it
        if manifest is not None and manifest.begun:
            return Clock(datetime.fromisoformat(manifest.begun))
    return Clock()


def require_files(folder: Path, manifest: Manifest) -> None:
    """Raises CorruptStateError if a file is missing. Others do not count: file systems and tools
    leave their own.
    """
    if missing := [name for name in sorted(manifest.checksums) if not (folder / name).exists()]:
        raise CorruptStateError(f"{missing[0]} is missing")


def checksum(path: Path) -> str:
    """A file's SHA-256. Raises OSError with the file's name if it cannot be read."""
    with naming(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def content_checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def require_same_run(
    manifest: Manifest, config: RunConfig, fingerprints: dict[str, str], processes: int
) -> list[str]:
    """Returns lines on the changes since the state that take effect. Raises ResumeError, with the
    names and the remedy, if an option or a content changed that must not.
    """
    same_content = {
        name for name, value in fingerprints.items() if manifest.fingerprints.get(name) == value
    }
    now, before = config.plain(), manifest.config
    changed = {
        name for name in now.keys() & before.keys() if now[name] != before[name]
    } - same_content
    # In half precision the state has a moving reference's mean as well.
    fixed = {"precision"} if now.get("reference_decay") else set()
    refused = sorted(changed - (config.changeable() - fixed))
    if refused:
        flags = ", ".join(f"--{name} ({before[name]} before, {now[name]} now)" for name in refused)
        raise ResumeError(
            f"--resume: this would be a different run: {flags}. Use the previous values, or a new --output_dir"
        )
    others = sorted(
        name
        for name in fingerprints.keys() & manifest.fingerprints.keys()
        if name not in same_content
    )
    contents = [name for name in others if not name.endswith(FUNCTION)]
    if contents:
        # A fingerprint of one of several rewards has the reward's name after the option.
        flags = ", ".join(
            f"--{name}" if " " in name else f"--{name} ({now[name]})" for name in contents
        )
        remedy = "Restore the old content, or use a new --output_dir"
        raise ResumeError(
            f"--resume: same name, but the content has changed since the run began: {flags}. {remedy}"
        )
    shown = sorted(changed - {"resume", "output_dir", "overwrite"})
    unset = {name: "" if name in config.named else " by default" for name in shown}
    lines = [
        f"resuming with another {name}: {before[name]} before, {now[name]} now{unset[name]}"
        for name in shown
    ]
    lines += [f"resuming with another source of the {name}" for name in others]
    if processes != manifest.processes:
        lines.append(
            f"resuming on another number of processes: {manifest.processes} before, {processes} now"
        )
    return lines
