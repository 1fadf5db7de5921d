"""Log-probabilities of a data set's responses under a frozen reference: computed once, and kept in a file of the run.

output_dir/reference-0123456789abcdef.safetensors    its name is a hash of examples, columns, model and precision

Packing and device, which the name leaves out, change their rounding alone.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from datasets import Dataset
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fastp3o.models.reference import Reference
from fastp3o.packing.pack import Packing, by_group, pack
from fastp3o.training.durable import write_file
from fastp3o.training.finite import require_finite
from fastp3o.training.order import process_share
from fastp3o.training.processes import on_main_process
from fastp3o_kernels import sequence_logprobs

NAME, CHECKSUM = "logprobs", "sha256"

# Examples that are packed together, and whose rows are in memory at a time.
CHUNK = 1024


class DamagedFileError(ValueError):
    """A file does not hold the log-probs that were written to it."""


class ReferenceLogprobs:
    """Of the responses in some columns of data sets, which go by names.

    folder: of the files. columns: those of one tuple share their prompt in a row, as they do in training. packing: of
    the rows. depends_on: what the log-probs depend on beside the examples, such as the model's fingerprint.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        folder: Path,
        data: Mapping[str, Dataset],
        columns: Sequence[Sequence[str]],
        packing: Packing,
        depends_on: Sequence[str],
    ):
        self.accelerator, self.data, self.columns, self.packing = accelerator, data, columns, packing
        self.paths = {
            name: folder / file_name(examples._fingerprint, columns, depends_on) for name, examples in data.items()
        }
        found = {self.paths[name]: self.find(name, examples) for name, examples in data.items()}
        self.known = {path: logprobs for path, logprobs in found.items() if logprobs is not None}

    @property
    def complete(self) -> bool:
        """Whether those of all data sets are known."""
        return self.known.keys() >= set(self.paths.values())

    def find(self, name: str, examples: Dataset) -> Tensor | None:
        """What the file of a data set has; a damaged one is said."""

        def read() -> tuple[Tensor | None, str | None]:
            try:
                return read_logprobs(self.paths[name], len(examples)), f"found in {self.paths[name]}"
            except FileNotFoundError:
                return None, None
            except DamagedFileError as error:
                return None, f"{error}: they are computed again"

        logprobs, line = on_main_process(self.accelerator, read)
        if line is not None:
            self.accelerator.print(f"{name}: log-probabilities of the reference: {line}")
        return logprobs

    def compute(self, reference: Reference, after_chunk: Callable[[], None]) -> None:
        """Computes what is not known, and writes it to its file. Raises NotFiniteError.

        after_chunk: called after so many examples, on every process; what it raises loses those of the data set.
        """
        for name, path in self.paths.items():
            if path not in self.known:
                logprobs = compute_logprobs(
                    self.accelerator, reference, self.data[name], self.columns, self.packing, after_chunk
                )
                on_main_process(self.accelerator, partial(write_logprobs, path, logprobs))
                self.known[path] = logprobs

    def added_to_data(self) -> dict[str, Dataset]:
        """The data sets with a further column `reference`, a list of R numbers."""
        return {
            name: examples.add_column(
                "reference", self.known[self.paths[name]].tolist(), new_fingerprint=examples._fingerprint
            )
            for name, examples in self.data.items()
        }


def file_name(*contents: object) -> str:
    return f"reference-{hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]}.safetensors"


def read_logprobs(path: Path, examples: int) -> Tensor:
    """[n, R] fp32 of so many examples.

    Raises FileNotFoundError where there is no file, and DamagedFileError where it holds something else.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            logprobs, expected = file.get_tensor(NAME), (file.metadata() or {}).get(CHECKSUM)
    except (OSError, SafetensorError) as error:
        raise DamagedFileError(f"{path} is damaged: {error}") from error
    if checksum(logprobs) != expected or len(logprobs) != examples:
        raise DamagedFileError(f"{path} is damaged: it has another checksum than when it was written")
    return logprobs


def write_logprobs(path: Path, logprobs: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, save({NAME: logprobs}, {CHECKSUM: checksum(logprobs)}))


def checksum(logprobs: Tensor) -> str:
    return hashlib.sha256(logprobs.contiguous().numpy().tobytes()).hexdigest()


def compute_logprobs(
    accelerator: Accelerator,
    reference: Reference,
    examples: Dataset,
    columns: Sequence[Sequence[str]],
    packing: Packing,
    after_chunk: Callable[[], None],
) -> Tensor:
    """log π_ref of the responses in R columns, [n, R] fp32 on the CPU of every process.

    Raises NotFiniteError where one is NaN or infinite.
    """
    chunks = []
    for first in range(0, len(examples), CHUNK):
        chunk = examples[first : first + CHUNK]
        of_tuples = [of_chunk(accelerator, reference, chunk, together, packing) for together in columns]
        chunks.append(torch.cat(of_tuples, dim=1))
        after_chunk()
    logprobs = torch.cat(chunks)
    require_finite(accelerator, "a log-probability of the reference", logprobs)
    return logprobs


def of_chunk(
    accelerator: Accelerator, reference: Reference, examples: dict[str, list], columns: Sequence[str], packing: Packing
) -> Tensor:
    prompts, groups = examples["prompt_ids"], list(zip(*(examples[column] for column in columns), strict=True))
    # A chunk may have fewer examples than there are processes, and each must make equally many passes, one at least.
    own = process_share(list(range(len(prompts))), accelerator) or [0]
    rows = pack([prompts[number] for number in own], [groups[number] for number in own], packing)
    rows = [row.to(accelerator.device) for row in rows]
    with accelerator.autocast():
        token_logprobs = reference(rows)
    logprobs = [sequence_logprobs(of_row, row.cu_seqlens) for of_row, row in zip(token_logprobs, rows, strict=True)]
    shares = gather_object([by_group(rows, logprobs).tolist()])
    return torch.tensor([shares[number % len(shares)][number // len(shares)] for number in range(len(prompts))])
