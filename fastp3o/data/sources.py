"""A hub name or a path -> rows, each with its file and its number.

Rows count from 1. In JSON Lines that is the line's number; in a JSON array, a parquet file or a hub split, the
position.
"""

import glob
import gzip
import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from fastp3o.data.errors import DataError, Found, RowError

JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
PARQUET = (".parquet",)
READABLE = JSON_LINES + JSON + PARQUET
# Suffixes that no hub name has, so that a mistyped path is not looked up on the hub.
FILE_SUFFIXES = (*READABLE, ".gz", ".csv", ".tsv", ".txt", ".arrow", ".zst", ".zip")
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
SPLIT_WORDS = {"train", "test", "validation", "valid", "val", "dev", "eval"}


class Row(NamedTuple):
    """One row as read. `content` is a dict or any other JSON value, and a RowError where it cannot be decoded."""

    file: str
    number: int
    content: object


def read_rows(source: str, split: str) -> Iterator[Row]:
    """The rows of local files, or of a split of a hub dataset. Raises DataError where `source` cannot be read."""
    files = local_files(source, split)
    if files is None:
        yield from hub_rows(source, split)
        return
    for file in files:
        try:
            yield from file_rows(file)
        except (OSError, EOFError, zlib.error, pa.ArrowException, ValueError, OverflowError, RecursionError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{file}: cannot be read: {error}") from error


# --- which files ----------------------------------------------------------------------------------------------------


def local_files(source: str, split: str) -> list[Path] | None:
    """The files that `source` means, or None where it can only be a hub name."""
    path = Path(source).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = files_of_split(path, split)
    elif any(character in source for character in "*?["):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if not files:
            raise DataError(f"{source}: no file matches")
    elif source.startswith(("/", ".", "~")) or source.endswith(FILE_SUFFIXES) or not HUB_NAME.fullmatch(source):
        raise DataError(f"{source}: no such file or folder")
    else:
        return None
    if "[" in split:
        raise DataError(f"{source}: the split '{split}' has a slice, which only the hub takes; use a limit for files")
    for file in files:
        if not file.name.endswith(READABLE):
            raise DataError(f"{file}: expected a file that ends with one of {', '.join(READABLE)}")
    return files


def files_of_split(folder: Path, split: str) -> list[Path]:
    """The files of a folder, or where their names carry a split's name (train, eval, …), those of `split`."""
    files = sorted(file for file in folder.iterdir() if file.name.endswith(READABLE))
    if not files:
        raise DataError(f"{folder}: no file in this folder ends with one of {', '.join(READABLE)}")
    words = {file: set(re.split(r"[^a-z]+", file.name.lower())) for file in files}
    assigned = [file for file in files if words[file] & (SPLIT_WORDS | {split})]
    if not assigned:
        return files
    if len(assigned) < len(files):
        other = next(file for file in files if file not in assigned)
        raise DataError(f"{folder}: some files are named after a split and {other.name} is not; name a file or a glob")
    chosen = [file for file in files if split in words[file]]
    if not chosen:
        raise DataError(
            f"{folder}: no file is named after the split '{split}'; found {', '.join(f.name for f in files)}"
        )
    return chosen


# --- their rows -----------------------------------------------------------------------------------------------------


def file_rows(file: Path) -> Iterator[Row]:
    if file.name.endswith(PARQUET):
        return parquet_rows(file)
    if file.name.endswith(JSON) and first_character(file) == b"[":
        return json_array_rows(file)
    return json_lines_rows(file)


def json_lines_rows(file: Path) -> Iterator[Row]:
    """Decodes line by line: readers with column types cast strings that look like dates, and lose line numbers."""
    with opened(file) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield Row(str(file), number, decoded(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line))


def json_array_rows(file: Path) -> Iterator[Row]:
    with opened(file) as content:
        array = decoded(content.read().removeprefix(b"\xef\xbb\xbf"))
    if isinstance(array, RowError):
        raise DataError(f"{file}: expected {array.expected}, got {array.got}")
    for number, content in enumerate(array, 1):
        yield Row(str(file), number, content)


def parquet_rows(file: Path) -> Iterator[Row]:
    number = 0
    with pq.ParquetFile(file) as table:
        for batch in table.iter_batches(batch_size=1000):
            for content in batch.to_pylist():
                number += 1
                yield Row(str(file), number, content)


def hub_rows(source: str, split: str) -> Iterator[Row]:
    name, _, config = source.partition(":")
    try:
        dataset = datasets.load_dataset(name, config or None, split=split)
    except Exception as error:  # the hub's own errors, the network's and the builders' share no base class
        raise DataError(f"{source}: the split '{split}' cannot be loaded from the hub: {error}") from error
    for number, content in enumerate(dataset, 1):
        yield Row(source, number, content)


def opened(file: Path) -> IO[bytes]:
    return gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb")


def first_character(file: Path) -> bytes:
    with opened(file) as content:
        return content.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, refused where a name comes twice: a plain dict would keep the last value and lose the others."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError("a field's name comes twice in one object")
    return content


def decoded(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError as error:
        return RowError(None, "text in UTF-8", Found(f"bytes that are not ({error.reason} at byte {error.start})"))
    except RecursionError:
        return RowError(None, "a JSON object", Found("values nested too deeply"))
    except ValueError as error:
        return RowError(None, "valid JSON", Found(f"text that is not ({error})"))
