"""The folder of a run's states: saves them, finds the newest whole one, loads it."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.errors import UserError
from fastp3o.files import (
    LEFTOVER,
    clear_leftovers,
    make_folder,
    move_into_place,
    naming,
    remove,
    sync,
    temporary_sibling,
    write_file,
)
from fastp3o.optimizer import Optimizer
from fastp3o.processes import on_every_process, on_main_process, require_all_finite
from fastp3o.run.manifest import (
    CorruptStateError,
    Manifest,
    checksum,
    listed_files,
    read_manifest,
    require_files,
)
from fastp3o.run.state_content import (
    generator_states,
    load_tensors,
    restore_generators,
    save_tensors,
    saved_names,
)

KEPT = 2
COUNTERS = "counters.json"
PENDING = "pending.json"
NAME = re.compile(r"step-(\d{6,})")
CORRUPT = re.compile(r"step-\d{6,}\.corrupt-[0-9a-f]{12}")


@dataclass(frozen=True)
class Progress:
    """The progress of a run: its state without the tensors.

    evaluated: whether the evaluation that is due after `step` was made. counters: states of the optimizer and other
    parts, by name. generators: states of this process's random generators.
    """

    step: int
    evaluated: bool
    counters: dict[str, dict[str, Any]] = field(repr=False)
    generators: dict[str, Any] = field(repr=False)


class Pending(Protocol):
    """Work that goes on beside the steps, such as rollouts of later ones."""

    def saved(self, step: int) -> dict[str, Any]:
        """What a run that goes on after `step` needs of it, as JSON, the same on all processes."""

    def restore(self, saved: dict[str, Any]) -> None:
        """Goes on from what `saved` has returned."""

    def close(self) -> None:
        """Gives up what is under way."""


@dataclass(frozen=True)
class RunState:
    """All that a run carries from step to step next to its optimizer.

    parts: with states of their own, by name, such as the scaling of rewards. tensors: gives the tensors that change;
    they are filled in place. pending: work under way, if there is any.
    """

    parts: Mapping[str, Stateful] = field(default_factory=dict)
    tensors: Callable[[], dict[str, Tensor]] = dict
    pending: Pending | None = None


class States:
    """The states of a run in `folder`. The newest two stay, and files with other names are not touched."""

    def __init__(self, folder: Path, optimizer: Optimizer, carried: RunState):
        self.accelerator, self.folder, self.optimizer = optimizer.accelerator, folder, optimizer
        self.other_tensors, self.pending = carried.tensors, carried.pending
        self.parts = {"optimizer": optimizer, **carried.parts}
        self.good: list[Path] = []
        self.corrupt: list[Path] = []

    @property
    def newest(self) -> Path | None:
        """The newest state that is known to be whole."""
        return self.good[-1] if self.good else None

    def progress(self, step: int, *, evaluated: bool) -> Progress:
        counters = {name: part.state_dict() for name, part in self.parts.items()}
        return Progress(step, evaluated, counters, generator_states())

    def with_loss_scale(self, progress: Progress) -> Progress:
        """The progress with the loss scale as the host has read it since."""
        optimizer = progress.counters["optimizer"] | {"loss_scale": self.optimizer.guard.state_dict()}
        return replace(progress, counters=progress.counters | {"optimizer": optimizer})

    def save(self, progress: Progress, config: dict[str, Any], fingerprints: dict[str, str]) -> None:
        """Writes a state and removes all but the last two. The optimizer must stand where `progress` was taken.

        Raises NotFiniteError, with nothing written, if a weight or a moment is not finite.
        """
        place = self.folder / f"step-{progress.step:06}"
        if place in self.good:
            return
        tensors = self.optimizer.tensors() | self.other_tensors()
        require_all_finite(self.accelerator, "a weight or a moment of AdamW", tensors.values())
        pending = {} if self.pending is None else self.pending.saved(progress.step)
        unfinished = on_main_process(self.accelerator, lambda: self.begin(place))
        try:
            with naming(place):
                save_tensors(unfinished, tensors)
            if pending:
                content = json.dumps(pending)
                on_main_process(self.accelerator, lambda: write_file(unfinished / PENDING, content))
            on_every_process(self.accelerator, lambda: self.write_numbers(unfinished, progress))
            checksums = self.checksums(unfinished)
            processes = self.accelerator.num_processes
            manifest = Manifest(progress.step, progress.evaluated, processes, config, fingerprints, checksums)
            on_main_process(self.accelerator, lambda: manifest.write(unfinished))
            on_main_process(self.accelerator, lambda: move_into_place(unfinished, place))
        except BaseException:
            if self.accelerator.is_main_process:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self.good = [*self.good, place][-KEPT:]
        on_main_process(self.accelerator, self.prune)

    @property
    def generators_file(self) -> str:
        return f"process-{self.accelerator.process_index:05}.json"

    def begin(self, place: Path) -> Path:
        unfinished = temporary_sibling(place)
        make_folder(self.folder)
        unfinished.mkdir()
        return unfinished

    def write_numbers(self, folder: Path, progress: Progress) -> None:
        write_file(folder / self.generators_file, json.dumps(progress.generators))
        if self.accelerator.is_main_process:
            write_file(folder / COUNTERS, json.dumps(progress.counters))

    def checksums(self, folder: Path) -> dict[str, str]:
        """The checksums of all files in a folder; each process reads its share of them."""
        files = on_main_process(self.accelerator, lambda: listed_files(folder))
        share = files[self.accelerator.process_index :: self.accelerator.num_processes]
        own = on_every_process(self.accelerator, lambda: [(name, checksum(folder / name)) for name in share])
        return dict(gather_object(own))

    def prune(self) -> None:
        """Removes all that has a state's name, except the good ones."""
        for path in self.folder.iterdir():
            if (NAME.fullmatch(path.name) or CORRUPT.fullmatch(path.name)) and path not in self.good:
                remove(path)

    def find(self) -> tuple[Manifest | None, list[str]]:
        """Finds the newest whole state, under any name, and says which newer ones are damaged. Changes nothing.

        Raises CorruptStateError if there are states and none is whole.
        """
        self.good, self.corrupt = [], []
        problems: list[str] = []
        for path, manifest, problem in on_main_process(self.accelerator, self.candidates):
            if manifest is not None:
                problem = self.mismatch(path, manifest)
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
        """Folders that are or should be states, newest first, with their manifests or the problem."""
        found: list[tuple[int, bool, Path, Manifest | None, str | None]] = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            named = NAME.fullmatch(path.name)
            if CORRUPT.fullmatch(path.name) or not path.is_dir():
                continue
            try:
                manifest = read_manifest(path)
                require_files(path, manifest)
            except CorruptStateError as error:
                # A folder with another name and without a whole manifest never was a state.
                if named:
                    found.append((int(named[1]), True, path, None, str(error)))
            else:
                found.append((manifest.step, bool(named), path, manifest, None))
        found.sort(key=lambda candidate: candidate[:2], reverse=True)
        return [(path, manifest, problem) for _, _, path, manifest, problem in found]

    def mismatch(self, path: Path, manifest: Manifest) -> str | None:
        """The problem with the files of a state, None if there is none."""
        try:
            checksums = self.checksums(path)
        except OSError as error:
            return f"{Path(error.filename).name} cannot be read ({error.strerror})"
        changed = sorted(name for name, expected in manifest.checksums.items() if checksums[name] != expected)
        return f"{changed[0]} has another checksum than when it was written" if changed else None

    def load(self, manifest: Manifest) -> Progress:
        """Restores the state that was found. Renames corrupt ones, so that their steps can be saved again.

        Raises ValueError, with nothing changed, if it lacks tensors that this run has next to the optimizer's.
        """
        assert self.newest is not None
        newest, others = self.newest, self.other_tensors()
        names = on_every_process(self.accelerator, lambda: saved_names(newest))
        if others.keys() - names:
            raise UserError(
                f"--resume: {newest} lacks {min(others.keys() - names)}, which this run has: was its --precision "
                "another? Give what was before, or a new --output_dir"
            )
        leftover = LEFTOVER.fullmatch(newest.name)
        folder = self.folder / leftover["name"] if leftover else newest
        on_main_process(self.accelerator, lambda: self.rename_states(newest, folder))
        self.good[-1] = folder
        self.optimizer.fill(names - others.keys(), partial(load_tensors, folder))
        if others:
            load_tensors(folder, others)
        on_every_process(self.accelerator, lambda: self.read_numbers(folder))
        if self.pending is not None and (folder / PENDING).exists():
            self.pending.restore(json.loads((folder / PENDING).read_text()))
        return self.progress(manifest.step, evaluated=manifest.evaluated)

    def rename_states(self, newest: Path, folder: Path) -> None:
        """Gives the state that was found its place, and corrupt ones another name."""
        for path in self.corrupt:
            path.rename(temporary_sibling(path, "corrupt"))
        if newest != folder:
            newest.rename(folder)
        sync(self.folder)

    def read_numbers(self, folder: Path) -> None:
        counters = json.loads((folder / COUNTERS).read_text())
        for name, part in self.parts.items():
            if name in counters:  # a part that an older fastp3o did not have begins anew
                part.load_state_dict(counters[name])
        generators = folder / self.generators_file
        if generators.exists():
            restore_generators(json.loads(generators.read_text()))

    def clear_leftovers(self) -> None:
        """Removes unfinished saves of earlier processes."""
        clear_leftovers(self.folder, NAME)
