"""Reads records from a hub name or a path, each with its file and number.

Numbers start at 1. They count the lines of JSON Lines, and the entries of a JSON array, a parquet
file or a hub split.

A table has one type for a column, so a field that one record has is null in all others, at every
level: such nulls, which nobody wrote, are taken out. In JSON a null is the author's.
"""

import glob
import gzip
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
from datasets.data_files import DataFilesDict, EmptyDatasetError, get_data_patterns

from fastp3o.data.errors import DataError, Found, RecordError
from fastp3o.errors import UserError
from fastp3o.sources import InMemory, Source

JSON_LINES = (".jsonl", ".jsonl.gz")
JSON = (".json", ".json.gz")
PARQUET = (".parquet",)
READABLE = JSON_LINES + JSON + PARQUET
# No hub name ends with these, so that a mistyped path is not looked up on the hub.
FILE_SUFFIXES = (*READABLE, ".gz", ".csv", ".tsv", ".txt", ".arrow", ".zst", ".zip")
SAVED_TO_DISK = ("dataset_info.json", "state.json")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
UNREADABLE = (
    OSError,
    EOFError,
    zlib.error,
    pa.ArrowException,
    ValueError,
    OverflowError,
    RecursionError,
)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
WHOLE = "train"  # the split that files and folders without one have


class Record(NamedTuple):
    """One record as read. `content` is any JSON value, of which only a dict is usable, or a
    RecordError.
    """

    file: str
    number: int
    content: object


def read_records(source: Source, split: str) -> Iterator[Record]:
    """The records of local files, or of a split of a hub data set; several sources, separated by
    commas, follow one another. Raises DataError if `source` cannot be read.
    """
    if isinstance(source, InMemory):  # a Dataset, or any other records that can be read twice
        if split != WHOLE:
            raise DataError(
                f"{source}: there is no split '{split}' of records in memory: take those of the split"
            )
        yield from (
            Record(str(source), *record) for record in enumerate(dataset_records(source.value), 1)
        )
        return
    names = [source] if os.path.exists(source) else [name.strip() for name in source.split(",")]
    if not all(names):
        raise DataError(f"{source}: expected comma-separated names, got an empty one")
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{source}: {twice[0]} comes more than once")
    # All files are found before the first record is read.
    files_by_name = [(name, local_files(name, split)) for name in names]
    before: dict[Path, Path] = {}
    for file in (file for _, files in files_by_name for file in files or ()):
        if (same := before.setdefault(file.resolve(), file)) is not file:
            raise DataError(
                f"{source}: {file} is the same file as {same}, and its records would count twice"
            )
    for name, files in files_by_name:
        if files is None:
            place, _, config = name.partition(":")
            try:
                dataset = datasets.load_dataset(place, config or None, split=split)
            except Exception as error:
                # the hub's own errors, the network's and the builders' share no base class
                raise DataError(
                    f"{name}: the split '{split}' cannot be loaded from the hub: {error}"
                ) from error
            yield from (Record(name, *record) for record in enumerate(dataset_records(dataset), 1))
            continue
        for file in files:
            try:
                yield from (Record(str(file), *record) for record in file_records(file))
            except DataError:
                raise
            except UNREADABLE as error:
                raise DataError(f"{file}: cannot be read: {error}") from error


# --- files ----------------------------------------------------------------------------------------


def local_files(source: str, split: str) -> list[Path] | None:
    """The files that `source` means, or None if it can only be a hub name."""
    path = Path(source).expanduser()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = split_files(path, split)
    elif any(character in source for character in "*?["):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if not files:
            raise DataError(f"{source}: no file matches")
    elif (
        source.startswith(("/", ".", "~"))
        or source.endswith(FILE_SUFFIXES)
        or not HUB_NAME.fullmatch(source)
    ):
        raise DataError(f"{source}: no such file or folder")
    else:
        return None
    if "[" in split:
        raise DataError(
            f"{source}: the split '{split}' has a slice, which only the hub takes; use a limit for files"
        )
    if split != WHOLE and not path.is_dir():
        raise DataError(f"{source}: there is no split '{split}': all that files hold is '{WHOLE}'")
    for file in files:
        if not file.name.endswith(READABLE):
            raise DataError(f"{file}: expected a file that ends with one of {', '.join(READABLE)}")
    return files


def split_files(folder: Path, split: str) -> list[Path]:
    """A split's readable files. Names of files and folders tell it as in `datasets`; all are train
    if none does.
    """
    if (folder / "dataset_dict.json").exists() or all(
        (folder / name).exists() for name in SAVED_TO_DISK
    ):
        raise DataError(
            f"{folder}: save_to_disk wrote this folder, which is not read: use to_json or to_parquet"
        )
    place = folder.absolute()
    pattern = glob.escape(str(place))
    try:
        named = DataFilesDict.from_patterns(get_data_patterns(pattern), base_path=pattern)
    except EmptyDatasetError:
        named = {}
    splits = {
        name: {Path(file) for file in files if file.endswith(READABLE)}
        for name, files in named.items()
    }
    files = set().union(*splits.values())
    if not files:
        raise DataError(f"{folder}: no file in this folder ends with one of {', '.join(READABLE)}")
    for file in sorted(place.iterdir()):
        if file.name.endswith(READABLE) and not file.name.startswith(".") and file not in files:
            mixed = f"some files are named after a split and {file.name} is not"
            raise DataError(f"{folder}: {mixed}; name a file or a glob")
    if not splits.get(split):
        names = ", ".join(str(file.relative_to(place)) for file in sorted(files))
        raise DataError(f"{folder}: no file is named after the split '{split}'; found {names}")
    return [folder / file.relative_to(place) for file in sorted(splits[split])]


# --- records --------------------------------------------------------------------------------------


def file_records(file: Path) -> Iterator[tuple[int, object]]:
    """The records of a file with their numbers."""
    if file.name.endswith(PARQUET):
        with pq.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if len(set(names)) < len(names):
                raise DataError(f"{file}: several columns have one name in {', '.join(names)}")
            batches = (batch.to_pylist() for batch in table.iter_batches(batch_size=1000))
            rows = (
                as_written(row, table.schema_arrow, json_is_text=True)
                for row in chain.from_iterable(batches)
            )
            yield from enumerate(rows, 1)
        return
    with open_binary(file) as content:
        begins_array = content.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()[:1] == b"["
    with open_binary(file) as content:
        if file.name.endswith(JSON) and begins_array:
            array = decode_json(content.read().removeprefix(BYTE_ORDER_MARK))
            if isinstance(array, RecordError):
                raise DataError(f"{file}: expected {array.expected}, got {array.got}")
            yield from enumerate(cast(list, array), 1)
            return
        # Line by line: readers that infer column types cast strings that look like dates and lose
        # line numbers.
        for number, line in enumerate(content, 1):
            text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
            if text.strip():
                yield number, decode_json(text)


def dataset_records(content: Iterable) -> Iterator[object]:
    """Records in memory: those of a Dataset are a table's; a stream's, too, whose types may be
    unknown.
    """
    if not isinstance(content, datasets.Dataset | datasets.IterableDataset):
        yield from content
        return
    schema = None if content.features is None else content.features.arrow_schema
    yield from (as_written(record, schema) for record in content)


def as_written(
    row: dict[str, Any], schema: pa.Schema | None, *, json_is_text: bool = False
) -> dict[str, Any]:
    """A table's row without the nulls below its columns. Values of Arrow's type for JSON keep
    theirs. json_is_text: whether those are not decoded yet.
    """
    kinds = {} if schema is None else dict(zip(schema.names, schema.types, strict=True))

    def written(value: Any, kind: pa.DataType | None) -> Any:
        if getattr(kind, "extension_name", "") == "arrow.json":
            return json.loads(value) if json_is_text and value is not None else value
        if isinstance(value, dict):
            inner = (
                {}
                if kind is None or not pa.types.is_struct(kind)
                else {part.name: part.type for part in kind}
            )
            return {
                name: written(part, inner.get(name))
                for name, part in value.items()
                if part is not None
            }
        if isinstance(value, list):
            return [written(part, getattr(kind, "value_type", None)) for part in value]
        return value

    return {name: written(value, kinds.get(name)) for name, value in row.items()}


# --- reading JSON strictly ------------------------------------------------------------------------


def open_binary(file: Path) -> BinaryIO | gzip.GzipFile:
    return gzip.open(file, "rb") if file.name.endswith(".gz") else file.open("rb")


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises ValueError if a name comes twice: a plain dict would silently keep only
    the last value.
    """
    content = dict(pairs)
    if len(content) < len(pairs):
        raise UserError("a field's name comes twice in one object")
    return content


def decode_json(text: bytes) -> object:
    try:
        return json.loads(text.decode(), object_pairs_hook=unique_fields)
    except (ValueError, RecursionError) as error:
        return RecordError(None, "valid JSON in UTF-8", Found(f"text that is not ({error})"))
