"""The folder of a run's states: saves them, finds the newest whole one, loads it."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fastp3o.training.durable import (
    LEFTOVER,
    beside,
    clear_leftovers,
    make_folder,
    move_into_place,
    remove,
    sync,
    write_file,
)
from fastp3o.training.finite import require_all_finite
from fastp3o.training.optimizer import Optimizer
from fastp3o.training.processes import on_every_process, on_main_process
from fastp3o.training.states.generators import generator_states, restore_generators
from fastp3o.training.states.manifest import (
    CorruptStateError,
    Manifest,
    checksum,
    files_of,
    read_manifest,
    require_files,
)
from fastp3o.training.states.tensors import load_tensors, save_tensors, saved_names

KEPT = 2
COUNTERS = "counters.json"
NAME = re.compile(r"step-(\d{6,})")
CORRUPT = re.compile(r"step-\d{6,}\.corrupt-[0-9a-f]{12}")


def generators_of(process: int) -> str:
    return f"process-{process:05}.json"


class Counts(Protocol):
    """What has a small state of numbers, such as the scaling of rewards."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


@dataclass(frozen=True)
class Progress:
    """How far a run is: all of its state but for the tensors.

    evaluated: whether the evaluation after `step`, where one is due, has been made. counters: of the optimizer and of
    other parts, by name. generators: the random ones of this process.
    """

    step: int
    evaluated: bool
    counters: dict[str, dict[str, Any]] = field(repr=False)
    generators: dict[str, Any] = field(repr=False)


class States:
    """The states of a run in `folder`, of which the newest two stay. What is there under other names stays too.

    tensors: gives those that change beside the optimizer's, which are filled in place.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        optimizer: Optimizer,
        parts: dict[str, Counts],
        tensors: Callable[[], dict[str, Tensor]] = dict,
    ):
        self.accelerator, self.folder, self.optimizer, self.other_tensors = accelerator, folder, optimizer, tensors
        self.parts = {"optimizer": optimizer, **parts}
        self.good: list[Path] = []
        self.corrupt: list[Path] = []

    @property
    def newest(self) -> Path | None:
        """The newest that is known to be whole."""
        return self.good[-1] if self.good else None

    def progress(self, step: int, *, evaluated: bool) -> Progress:
        counters = {name: part.state_dict() for name, part in self.parts.items()}
        return Progress(step, evaluated, counters, generator_states())

    def save(self, progress: Progress, config: dict[str, Any], fingerprints: dict[str, str]) -> None:
        """Writes a state and removes all but the last two. The optimizer must stand where `progress` was taken.

        Raises NotFiniteError, with nothing written, where a weight or a moment is not finite.
        """
        place = self.folder / f"step-{progress.step:06}"
        if place in self.good:
            return
        tensors = self.optimizer.tensors() | self.other_tensors()
        require_all_finite(self.accelerator, "a weight or a moment of AdamW", tensors.values())
        unfinished = on_main_process(self.accelerator, lambda: self.begin(place))
        try:
            save_tensors(unfinished, tensors)
            on_every_process(self.accelerator, lambda: self.write_numbers(unfinished, progress))
            checksums = self.checksums(unfinished)
            processes = self.accelerator.num_processes
            manifest = Manifest(progress.step, progress.evaluated, processes, config, fingerprints, checksums)
            on_main_process(self.accelerator, lambda: self.finish(unfinished, manifest, place))
        except BaseException:
            if self.accelerator.is_main_process:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self.good = [*self.good, place][-KEPT:]
        on_main_process(self.accelerator, self.prune)

    def begin(self, place: Path) -> Path:
        unfinished = beside(place)
        make_folder(self.folder)
        unfinished.mkdir()
        return unfinished

    def write_numbers(self, folder: Path, progress: Progress) -> None:
        write_file(folder / generators_of(self.accelerator.process_index), json.dumps(progress.generators))
        if self.accelerator.is_main_process:
            write_file(folder / COUNTERS, json.dumps(progress.counters))

    def finish(self, unfinished: Path, manifest: Manifest, place: Path) -> None:
        manifest.write(unfinished)
        move_into_place(unfinished, place)

    def checksums(self, folder: Path) -> dict[str, str]:
        """Of all files in a folder, of which each process reads its share."""
        files = on_main_process(self.accelerator, lambda: files_of(folder))
        share = files[self.accelerator.process_index :: self.accelerator.num_processes]
        own = on_every_process(self.accelerator, lambda: [(name, checksum(folder / name)) for name in share])
        return dict(gather_object(own))

    def prune(self) -> None:
        """Removes what has a state's name, but for the good ones."""
        for path in self.folder.iterdir():
            if (NAME.fullmatch(path.name) or CORRUPT.fullmatch(path.name)) and path not in self.good:
                remove(path)

    def find(self) -> tuple[Manifest | None, list[str]]:
        """The newest whole state, under whatever name, and lines on newer ones that are not. Changes nothing.

        Raises CorruptStateError where there are states and none is whole.
        """
        self.good, self.corrupt = [], []
        problems: list[str] = []
        for path, manifest, problem in on_main_process(self.accelerator, self.candidates):
            if manifest is not None:
                problem = problem or self.mismatch(path, manifest)
                if problem is None:
                    # Those before it were whole when they were written.
                    self.good = [*self.older(manifest.step), path][-KEPT:]
                    return manifest, problems
            self.corrupt.append(path)
            problems.append(f"{path} is corrupt: {problem}")
        if problems:
            reasons = "; ".join(problems)
            raise CorruptStateError(
                f"--resume: no state is whole. {reasons}. Remove {self.folder} to begin anew, or restore a copy of it"
            )
        return None, []

    def older(self, step: int) -> list[Path]:
        names = on_main_process(self.accelerator, lambda: sorted(path.name for path in self.folder.iterdir()))
        steps = sorted((int(match[1]), name) for name in names if (match := NAME.fullmatch(name)))
        return [self.folder / name for number, name in steps if number < step]

    def candidates(self) -> list[tuple[Path, Manifest | None, str | None]]:
        """Folders that are or should be states, newest first, with their manifests or what is wrong with them."""
        found: list[tuple[int, bool, Path, Manifest | None, str | None]] = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            named = NAME.fullmatch(path.name)
            if CORRUPT.fullmatch(path.name) or not path.is_dir():
                continue
            try:
                manifest = read_manifest(path)
                require_files(path, manifest)
            except CorruptStateError as error:
                # Without a whole manifest, a folder of another name never was a state.
                if named:
                    found.append((int(named[1]), True, path, None, str(error)))
            else:
                found.append((manifest.step, bool(named), path, manifest, None))
        found.sort(key=lambda candidate: candidate[:2], reverse=True)
        return [(path, manifest, problem) for _, _, path, manifest, problem in found]

    def mismatch(self, path: Path, manifest: Manifest) -> str | None:
        """What is wrong with the files of a state."""
        try:
            checksums = self.checksums(path)
        except OSError as error:
            return f"{Path(error.filename).name} cannot be read ({error.strerror})"
        changed = sorted(name for name, expected in manifest.checksums.items() if checksums[name] != expected)
        return f"{changed[0]} has another checksum than when it was written" if changed else None

    def load(self, manifest: Manifest) -> Progress:
        """Restores the state that was found. Puts corrupt ones aside, so that their steps can be saved again.

        Raises ValueError, with nothing changed, where it lacks what this run has beside the optimizer.
        """
        assert self.newest is not None
        newest, others = self.newest, self.other_tensors()
        names = on_every_process(self.accelerator, lambda: saved_names(newest))
        if others.keys() - names:
            raise ValueError(
                f"--resume: {newest} lacks {min(others.keys() - names)}, which this run has: was its --precision "
                "another? Give what was before, or a new --output_dir"
            )
        leftover = LEFTOVER.fullmatch(self.newest.name)
        folder = self.folder / leftover["name"] if leftover else self.newest
        on_main_process(self.accelerator, lambda: self.put_in_order(folder))
        self.good[-1] = folder
        self.optimizer.fill(names - others.keys(), partial(load_tensors, folder))
        if others:
            load_tensors(folder, others)
        on_every_process(self.accelerator, lambda: self.read_numbers(folder))
        return self.progress(manifest.step, evaluated=manifest.evaluated)

    def put_in_order(self, folder: Path) -> None:
        """Gives the state that was found its name, and corrupt ones another."""
        assert self.newest is not None
        for path in self.corrupt:
            path.rename(beside(path, "corrupt"))
        if self.newest != folder:
            self.newest.rename(folder)
        sync(self.folder)

    def read_numbers(self, folder: Path) -> None:
        counters = json.loads((folder / COUNTERS).read_text())
        for name, part in self.parts.items():
            part.load_state_dict(counters[name])
        generators = folder / generators_of(self.accelerator.process_index)
        if generators.exists():
            restore_generators(json.loads(generators.read_text()))

    def clear_leftovers(self) -> None:
        """Removes what saves of earlier processes have left unfinished."""
        clear_leftovers(self.folder, NAME)
