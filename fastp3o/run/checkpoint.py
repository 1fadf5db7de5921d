"""The folder of a run's states: saves them, finds the newest whole one, loads it.

A state has named tensors as safetensors, and the random generators of each process as JSON. The
run's own random choices depend on seed and step only, but a reward function may draw from the
global generators.
"""

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.stateful import Stateful

from fastp3o.errors import UserError
from fastp3o.files import (
    from_here,
    make_unfinished,
    move_into_place,
    naming,
    place_of,
    remove,
    sync,
    temporary_sibling,
    write_file,
)
from fastp3o.optimizer.optimizer import Optimizer
from fastp3o.run.manifest import (
    CorruptStateError,
    Manifest,
    checksum,
    part_name,
    read_manifest,
    read_unplaced,
    require_files,
)
from fastp3o.run.tensors import copied_to_write, load_tensors
from fastp3o.runtime.finiteness import require_all_finite
from fastp3o.runtime.processes import on_every_process, on_main_process

# --- random generators ----------------------------------------------------------------------------


def generator_states() -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": [version, numbers, gauss],
        "numpy": [kind, np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state().tolist(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    if torch.cuda.is_available() and "cuda" in states:
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))


KEPT = 2
COUNTERS = "counters.json"
PENDING = "pending.json"
NAME = re.compile(r"step-(\d{6,})")
CORRUPT = re.compile(r"step-\d{6,}\.corrupt-[0-9a-f]{12}")


# --- folders that appear whole --------------------------------------------------------------------


def put_in_place(unfinished: Path, manifest: Manifest) -> None:
    """Writes the manifest of a state that is whole, and gives the state its name."""
    place = place_of(unfinished)
    assert place is not None
    manifest.write(unfinished)
    for process in range(manifest.processes):
        (unfinished / part_name(process)).unlink(missing_ok=True)
    move_into_place(unfinished, place)


def newest_first(states: Path) -> list[Path]:
    """The states in a folder, damaged ones and those that have no name of their own yet among them."""
    folders = states.iterdir() if states.is_dir() else ()
    named = [path for path in folders if NAME.fullmatch(placed_name(path)) and path.is_dir()]
    return sorted(named, key=lambda path: int(placed_name(path)[len("step-") :]), reverse=True)


def placed_name(state: Path) -> str:
    """The name that a state has once it is in its place."""
    return (place_of(state) or state).name


# --- the state of a run ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Progress:
    """The progress of a run: its state without the tensors. evaluated: whether the evaluation that
    is due after `step` was made. counters: states of the optimizer and other parts, by name.
    generators: of this process's random numbers.
    """

    step: int
    evaluated: bool
    counters: dict[str, dict[str, Any]] = field(repr=False)
    generators: dict[str, Any] = field(repr=False)


class Pending(Protocol):
    """Work that continues beside the steps, such as rollouts of later ones."""

    def saved(self, step: int) -> dict[str, Any]:
        """The values that a run which continues after `step` needs, as JSON, the same on all
        processes.
        """

    def restore(self, saved: dict[str, Any]) -> None:
        """Continues from what `saved` has returned."""

    def close(self) -> None:
        """Gives up what is under way."""


@dataclass(frozen=True)
class RunState:
    """All that a run carries from step to step next to its optimizer. parts: with states of their
    own, by name, such as the scaling of rewards. tensors: gives the tensors that change; they are
    filled in place. pending: work under way.
    """

    parts: Mapping[str, Stateful] = field(default_factory=dict)
    tensors: Callable[[], dict[str, Tensor]] = dict
    pending: Pending | None = None


class States:
    """The states of a run in `folder`. The newest two stay, and files with other names are not
    touched.

    `save` copies a state, which a thread of each process writes while the run continues. `place`
    waits for the threads of all processes, at the same point of the run on each. A state that is
    whole and was not placed, since the run was killed, is found all the same.
    """

    def __init__(self, folder: Path, optimizer: Optimizer, carried: RunState, begun: str = ""):
        """begun: a Manifest's."""
        self.accelerator = optimizer.accelerator
        self.folder = folder
        self.optimizer = optimizer
        self.begun = begun
        self.other_tensors, self.pending = carried.tensors, carried.pending
        self.parts = {"optimizer": optimizer, **carried.parts}
        self.newest: Path | None = None  # the newest state that is known to be whole
        # Waits for the state that is being written, and places it.
        self.writing: Iterator[None] = iter(())
        self.written: Future[dict[str, str]] | None = None  # this process's part of that state
        self.corrupt: list[Path] = []

    def progress(self, step: int, *, evaluated: bool) -> Progress:
        counters = {name: part.state_dict() for name, part in self.parts.items()}
        return Progress(step, evaluated, counters, generator_states())

    def with_loss_scale(self, progress: Progress) -> Progress:
        """The progress with the loss scale as the host has read it since."""
        optimizer = progress.counters["optimizer"] | {
            "loss_scale": self.optimizer.guard.state_dict()
        }
        return replace(progress, counters=progress.counters | {"optimizer": optimizer})

    # --- saving -----------------------------------------------------------------------------------

    def save(
        self, progress: Progress, config: dict[str, Any], fingerprints: dict[str, str]
    ) -> None:
        """Copies a state, which is then written until `place`. The optimizer must stand where
        `progress` was taken. Raises NotFiniteError, with nothing written, if a weight or a moment
        is not finite.
        """
        self.place()
        if self.folder / f"step-{progress.step:06}" != self.newest:
            self.writing = self.write_and_place(progress, config, fingerprints)
            next(self.writing)

    def place(self) -> None:
        """Puts the state that is being written in its place once it is whole, and removes all but
        the last two. Raises the error of any process's thread on all of them.
        """
        writing, self.writing = self.writing, iter(())
        next(writing, None)
        self.written = None

    @property
    def part_is_written(self) -> bool:
        """Whether this process has written its part of a state that is not in its place."""
        return self.written is not None and self.written.done()

    def place_alone(self) -> None:
        """Places the state that is being written if it is whole, after an error: the other
        processes may be anywhere. One that still lacks a process's part stays as it is, and `find`
        looks again.
        """
        if self.written is None:
            return
        wait([self.written])
        if self.accelerator.is_main_process:
            manifest = read_unplaced(self.unfinished)
            with suppress(OSError):  # what has ended the run is what is told
                if manifest is not None:
                    put_in_place(self.unfinished, manifest)

    def write_and_place(
        self, progress: Progress, config: dict[str, Any], fingerprints: dict[str, str]
    ) -> Iterator[None]:
        """Yields once the state is copied: what it has may change then."""
        place = self.folder / f"step-{progress.step:06}"
        tensors = self.optimizer.tensors() | self.other_tensors()
        require_all_finite(self.accelerator, "a weight or a moment of AdamW", tensors.values())
        pending = {} if self.pending is None else self.pending.saved(progress.step)
        numbers: dict[str, Any] = {f"{self.process}.json": progress.generators}
        if self.accelerator.is_main_process:
            numbers |= {COUNTERS: progress.counters} | ({PENDING: pending} if pending else {})
        texts = {name: json.dumps(content) for name, content in numbers.items()}
        processes = self.accelerator.num_processes
        manifest = Manifest(
            progress.step, progress.evaluated, processes, config, fingerprints, {}, self.begun
        )
        self.unfinished = unfinished = on_main_process(
            self.accelerator, lambda: make_unfinished(place)
        )
        try:
            with naming(place), ThreadPoolExecutor(1) as thread:
                write_tensors = copied_to_write(unfinished / f"{self.process}.safetensors", tensors)

                def write() -> dict[str, str]:
                    sums = write_tensors() | {
                        name: write_file(unfinished / name, text) for name, text in texts.items()
                    }
                    replace(manifest, checksums=sums).write(
                        unfinished, part_name(self.accelerator.process_index)
                    )
                    return sums

                self.written = written = thread.submit(write)
                yield
                sums = on_every_process(self.accelerator, written.result)
                manifest = replace(manifest, checksums=dict(gather_object([*sums.items()])))
                on_main_process(self.accelerator, lambda: put_in_place(unfinished, manifest))
        except Exception:
            if self.accelerator.is_main_process and read_unplaced(unfinished) is None:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        self.newest = place
        on_main_process(self.accelerator, self.prune)

    @property
    def process(self) -> str:
        """The name of this process's files."""
        return f"process-{self.accelerator.process_index:05}"

    # --- finding ----------------------------------------------------------------------------------

    def prune(self) -> None:
        """Removes corrupt states, and all but the last two."""
        names = sorted(path.name for path in self.folder.iterdir())
        states = sorted(
            (name for name in names if NAME.fullmatch(name)),
            key=lambda name: int(name[len("step-") :]),
        )
        for name in [*states[:-KEPT], *filter(CORRUPT.fullmatch, names)]:
            remove(self.folder / name)

    def find(self) -> tuple[Manifest | None, list[str]]:
        """Finds the newest whole state, and says which newer ones are damaged. Changes nothing.
        Raises CorruptStateError if there are states and none is whole.
        """
        self.newest, self.corrupt = None, []
        problems: list[str] = []
        for path, manifest, problem in on_main_process(self.accelerator, self.candidates):
            if manifest is not None:
                problem = self.mismatch(path, manifest)
                if problem is None:
                    self.newest = path
                    return manifest, problems
            if place_of(path) is not None:  # it was never called a state
                continue
            self.corrupt.append(path)
            problems.append(f"{from_here(path)} is corrupt: {problem}")
        if problems:
            remedy = f"Remove {from_here(self.folder)} to start over, or restore a copy of it"
            problem = "; ".join(problems)
            raise CorruptStateError(f"--resume: no state is whole. {problem}. {remedy}")
        return None, []

    def candidates(self) -> list[tuple[Path, Manifest | None, str | None]]:
        """States, newest first, with their manifests or the problem; also whole ones that are not
        in their place.
        """
        states: list[tuple[Path, Manifest | None, str | None]] = []
        for path in newest_first(self.folder):
            if (place := place_of(path)) is not None:
                manifest = read_unplaced(path)
                if manifest is not None and not place.exists():
                    states.append((path, manifest, None))
                continue
            try:
                manifest = read_manifest(path)
                require_files(path, manifest)
                states.append((path, manifest, None))
            except CorruptStateError as error:
                states.append((path, None, str(error)))
        return states

    def mismatch(self, path: Path, manifest: Manifest) -> str | None:
        """The problem with the files of a state, None if there is none."""
        # Each process reads its share.
        names = sorted(manifest.checksums)[
            self.accelerator.process_index :: self.accelerator.num_processes
        ]
        try:
            sums = on_every_process(
                self.accelerator, lambda: [(name, checksum(path / name)) for name in names]
            )
        except OSError as error:
            return f"{Path(error.filename).name} cannot be read ({error.strerror})"
        written = dict(gather_object(sums))
        changed = sorted(
            name for name, expected in manifest.checksums.items() if written[name] != expected
        )
        return (
            f"{changed[0]} has a different checksum than when it was written" if changed else None
        )

    # --- loading ----------------------------------------------------------------------------------

    def load(self, manifest: Manifest) -> Progress:
        """Restores the state that was found. Renames corrupt ones, so that their steps can be saved
        again. Raises ValueError, with nothing changed, if it lacks tensors that this run has next
        to the optimizer's.
        """
        assert self.newest is not None
        newest, others = self.newest, self.other_tensors()
        reader = HuggingFaceStorageReader(str(newest))
        names = on_every_process(
            self.accelerator, lambda: set(reader.read_metadata().state_dict_metadata)
        )
        if others.keys() - names:
            lacks = f"{from_here(newest)} lacks {min(others.keys() - names)}, which this run has"
            raise UserError(
                f"--resume: {lacks}: did it use another --precision? Use that one, or a new --output_dir"
            )
        on_main_process(self.accelerator, self.rename_corrupt)
        if (place := place_of(newest)) is not None:
            on_main_process(self.accelerator, lambda: put_in_place(newest, manifest))
            on_main_process(self.accelerator, self.prune)
            self.newest = newest = place
        self.optimizer.fill(names - others.keys(), partial(load_tensors, newest))
        if others:
            load_tensors(newest, others)
        on_every_process(self.accelerator, lambda: self.read_numbers(newest))
        if self.pending is not None and (newest / PENDING).exists():
            self.pending.restore(json.loads((newest / PENDING).read_text()))
        return self.progress(manifest.step, evaluated=manifest.evaluated)

    def rename_corrupt(self) -> None:
        for path in self.corrupt:
            path.rename(temporary_sibling(path, "corrupt"))
        sync(self.folder)

    def read_numbers(self, folder: Path) -> None:
        counters = json.loads((folder / COUNTERS).read_text())
        for name, part in self.parts.items():
            if name in counters:  # a part that an older fastp3o did not have begins again
                part.load_state_dict(counters[name])
        generators = folder / f"{self.process}.json"
        if generators.exists():
            restore_generators(json.loads(generators.read_text()))
