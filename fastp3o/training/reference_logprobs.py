"""Log-probabilities of a data set's responses under a frozen reference, computed once and kept in a
file.

output_dir/reference-0123456789abcdef.safetensors    its name is a hash of examples, columns, model and precision

Packing and device change only the rounding, so the name leaves them out.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from datasets import Dataset
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from fastp3o.errors import UserError
from fastp3o.files import write_file
from fastp3o.models.overflow import Overflow, first_overflow, overflow_in_fp16
from fastp3o.models.reference import Reference
from fastp3o.packing.pack import Packing, pack
from fastp3o.packing.tables import sums_by_group
from fastp3o.runtime.finiteness import NotFiniteError, require_finite
from fastp3o.runtime.precision import wider_precision
from fastp3o.runtime.processes import on_main_process
from fastp3o.runtime.shares import Share

NAME = "logprobs"
CHUNK = 1024  # examples that are packed together, and whose rows are in memory at a time


class ReferenceLogprobs:
    """The reference's log-probs of the responses in some columns of named data sets. share: of the
    examples that this process computes. folder: of the files. columns: those of one tuple share
    their prompt in a row, as they do in training. depends_on: what else than the examples the
    log-probs depend on, such as the model's fingerprint.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        share: Share,
        folder: Path,
        data: Mapping[str, Dataset],
        columns: Sequence[Sequence[str]],
        packing: Packing,
        depends_on: Sequence[str],
    ):
        self.accelerator = accelerator
        self.share = share
        self.data = data
        self.columns = columns
        self.packing = packing
        self.paths: dict[str, Path] = {}
        for name, examples in data.items():
            contents = json.dumps([examples._fingerprint, columns, depends_on])
            self.paths[name] = (
                folder
                / f"reference-{hashlib.sha256(contents.encode()).hexdigest()[:16]}.safetensors"
            )
        self.logprobs_by_path: dict[Path, Tensor] = {}
        for name, path in self.paths.items():
            logprobs = on_main_process(accelerator, partial(read_logprobs, path))
            if logprobs is not None:
                accelerator.print(f"{name}: log-probabilities of the reference: found in {path}")
                self.logprobs_by_path[path] = logprobs

    @property
    def complete(self) -> bool:
        """Whether the log-probs of all data sets are known."""
        return self.logprobs_by_path.keys() >= set(self.paths.values())

    def compute(self, reference: Reference, after_chunk: Callable[[], None]) -> None:
        """Computes the log-probs that are not known, and writes them to files. after_chunk: called
        after every CHUNK examples, on every process; its error loses the log-probs of the data set.
        Raises NotFiniteError for these.
        """
        for name, path in self.paths.items():
            if path not in self.logprobs_by_path:
                logprobs = self.compute_one(reference, self.data[name], after_chunk)
                on_main_process(self.accelerator, partial(write_logprobs, path, logprobs))
                self.logprobs_by_path[path] = logprobs

    def compute_one(
        self, reference: Reference, examples: Dataset, after_chunk: Callable[[], None]
    ) -> Tensor:
        """log π_ref of the responses in R columns, [n, R] fp32 on the CPU of every process."""
        chunks = []
        for first in range(0, len(examples), CHUNK):
            chunk = examples[first : first + CHUNK]
            chunks.append(
                torch.cat(
                    [self.chunk_logprobs(reference, chunk, names) for names in self.columns], dim=1
                )
            )
            after_chunk()
        logprobs = torch.cat(chunks)
        try:
            require_finite(self.accelerator, "a log-probability of the reference", logprobs)
        except NotFiniteError as error:
            number = int((~logprobs.isfinite()).any(dim=1).nonzero()[0])
            if overflow := self.overflow(reference, examples[number : number + 1]):
                remedy = f"--precision {wider_precision(trains=True).name} has a wider range"
                raise NotFiniteError(f"{error}, since {overflow}: {remedy}") from error
            raise
        return logprobs

    def overflow(self, reference: Reference, example: dict[str, list]) -> Overflow | None:
        """The values of an example that overflow fp16, the same one on all processes."""
        responses = [[example[column][0] for names in self.columns for column in names]]
        (row,) = pack(example["prompt_ids"], responses, self.packing)
        return first_overflow([overflow_in_fp16(reference.model, row, self.accelerator.device)])

    def chunk_logprobs(
        self, reference: Reference, examples: dict[str, list], columns: Sequence[str]
    ) -> Tensor:
        prompts = examples["prompt_ids"]
        groups = list(zip(*(examples[column] for column in columns), strict=True))
        # Each process must make equally many passes, at least one, even if it has no example of
        # this chunk.
        numbers = self.share.numbers(len(prompts)) or [0]
        rows = pack(
            [prompts[number] for number in numbers],
            [groups[number] for number in numbers],
            self.packing,
        )
        rows = [row.to(self.accelerator.device) for row in rows]
        with self.accelerator.autocast():
            token_logprobs = reference(rows)
        shares = self.share.gather([sums_by_group(rows, token_logprobs).tolist()])
        return torch.tensor(
            [shares[number % len(shares)][number // len(shares)] for number in range(len(prompts))]
        )

    def added_to_data(self) -> dict[str, Dataset]:
        """The data sets with a further column `reference`, a list of R numbers."""
        return {
            name: examples.add_column(
                "reference",
                self.logprobs_by_path[self.paths[name]].tolist(),
                new_fingerprint=examples._fingerprint,
            )
            for name, examples in self.data.items()
        }


def read_logprobs(path: Path) -> Tensor | None:
    """[n, R] fp32, None if there is no file."""
    try:
        return load_file(path)[NAME] if path.exists() else None
    except SafetensorError as error:
        raise UserError(
            f"{path} is damaged ({error}): remove it, and its log-probs are computed again"
        ) from error


def write_logprobs(path: Path, logprobs: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save({NAME: logprobs}))
