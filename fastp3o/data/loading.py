"""The three loaders: rows -> texts -> token ids in a memory-mapped Dataset, and a report of what was cut or skipped."""

import functools
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from fastp3o.data.encoding import Encoded, Encoder, Texts
from fastp3o.data.errors import DataError, Found, RowError
from fastp3o.data.layouts import Layout, find_layout
from fastp3o.data.sources import Row, read_rows

BATCH = 1000  # rows tokenised at once


@dataclass
class DataReport:
    """What loading did: usable rows, texts cut at a limit (a pair may count two responses), rows skipped and why."""

    rows: int = 0
    truncated_prompts: int = 0
    truncated_responses: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        cut = f"{self.truncated_prompts} prompts and {self.truncated_responses} responses truncated"
        why = "; ".join(f"{count} × {reason}" for reason, count in self.reasons.most_common())
        return f"{self.rows} rows, {cut}, {self.skipped} rows skipped" + (f" ({why})" if why else "")


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """The prompts of any layout (see layouts.py).

    Args:
        source: a hub name ("owner/name" or "owner/name:config"), a .jsonl, .json (both also .gz) or .parquet file, a
            glob, or a folder, of which the files named after `split` are taken where files are named so.
        split: the hub's split; of files, only a folder looks at it.
        max_prompt_tokens: longer prompts lose their beginning and are counted.
        skip_bad_records: skip and count rows that cannot be used, instead of stopping at the first.
        limit: take this many usable rows and read no further.

    Returns:
        Dataset with the columns `prompt` (the text as the model sees it: after the chat template, without a truncated
        beginning; without the token that the tokenizer itself puts first) and `prompt_ids` (list of int32); and the
        report.

    Raises:
        DataError: the source cannot be read, a row cannot be used, or none can.
        ValueError: a limit leaves no room.
    """
    encoder = Encoder.of(tokenizer, max_prompt_tokens, None)
    return load(source, encoder, (), split, skip_bad_records, limit)


def load_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    max_response_tokens: int,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Prompts with one response each, for SFT; of preference pairs, the chosen one. Arguments as in `load_prompts`.

    Returns:
        Dataset with the columns `prompt`, `prompt_ids` and `response_ids`; and the report. `response_ids` ends with the
        end-of-sequence token, unless that fell off a response longer than `max_response_tokens` (which counts it).

    Raises:
        DataError, ValueError: as `load_prompts`; also where the tokenizer has no end-of-sequence token.
    """
    encoder = Encoder.of(tokenizer, max_prompt_tokens, max_response_tokens)
    return load(source, encoder, ("response_ids",), split, skip_bad_records, limit)


def load_preferences(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    max_response_tokens: int,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Prompts with a chosen and a rejected response, for the reward model. Arguments as in `load_prompts`.

    Returns:
        Dataset with the columns `prompt`, `prompt_ids`, `chosen_ids` and `rejected_ids`; and the report. Responses end
        as in `load_demonstrations`. Rows whose two responses are equal (also: equal once truncated) cannot be used.

    Raises:
        DataError, ValueError: as `load_demonstrations`.
    """
    encoder = Encoder.of(tokenizer, max_prompt_tokens, max_response_tokens)
    return load(source, encoder, ("chosen_ids", "rejected_ids"), split, skip_bad_records, limit)


def load(
    source: str,
    encoder: Encoder,
    response_columns: tuple[str, ...],
    split: str,
    skip_bad_records: bool,
    limit: int | None,
) -> tuple[Dataset, DataReport]:
    """What the three loaders share; they differ in the columns that hold responses."""
    if limit is not None and limit < 1:
        raise ValueError(f"limit must be at least 1, got {limit}")
    ids = List(Value("int32"))
    features = Features({"prompt": Value("string"), "prompt_ids": ids, **dict.fromkeys(response_columns, ids)})
    loading = Loading(encoder, response_columns, skip_bad_records, DataReport())
    path = new_arrow_file()
    with pa.ipc.new_stream(path, features.arrow_schema) as writer:
        for records in loading.records(read_rows(str(source), split), limit):
            writer.write_table(pa.Table.from_pylist(records, schema=features.arrow_schema))
    if not loading.report.rows:
        raise DataError(f"{source}: expected at least one usable row, got none ({loading.report})")
    return Dataset.from_file(path), loading.report


@dataclass(frozen=True)
class Loading:
    """One pass over the rows of a source."""

    encoder: Encoder
    response_columns: tuple[str, ...]
    skip_bad_records: bool
    report: DataReport

    def records(self, rows: Iterator[Row], limit: int | None) -> Iterator[list[dict]]:
        """Batches of the dataset's rows, `limit` in all."""
        readable = self.readable(rows)
        while batch := list(islice(readable, self.room(limit))):
            encoded = self.encoder.encode([texts for _, texts in batch])
            records = [self.record(row, result) for (row, _), result in zip(batch, encoded, strict=True)]
            yield [record for record in records if record is not None]

    def room(self, limit: int | None) -> int:
        """Rows to read next: never so many that a row past the limit could stop the run."""
        return BATCH if limit is None else min(BATCH, limit - self.report.rows)

    def readable(self, rows: Iterator[Row]) -> Iterator[tuple[Row, Texts]]:
        """The rows that hold what they should, as texts."""
        layouts: dict[str, Layout] = {}
        for row in rows:
            try:
                texts = self.texts(row, layouts)
            except RowError as problem:
                self.reject(row, problem)
            else:
                yield row, texts

    def texts(self, row: Row, layouts: dict[str, Layout]) -> Texts:
        """Reads a row by its file's layout, which the first row that has one decides: later rows may not change it."""
        if isinstance(row.content, RowError):
            raise row.content
        if not isinstance(row.content, Mapping):
            raise RowError(None, "an object", row.content)
        if row.file not in layouts:
            layouts[row.file] = find_layout(row.content, len(self.response_columns))
        layout = layouts[row.file]
        prompt = layout.prompt(row.content)
        if not isinstance(prompt.value, str) and self.encoder.tokenizer.chat_template is None:
            raise DataError(f"{row.file} row {row.number}: holds messages, and the tokenizer has no chat template")
        responses = layout.responses(row.content) if self.response_columns else ()
        return self.encoder.render(prompt, responses[: len(self.response_columns)])

    def record(self, row: Row, result: Encoded | RowError) -> dict | None:
        """The dataset's row, counted; None where the row was skipped."""
        if isinstance(result, Encoded) and is_equal_pair(result.response_ids):
            result = RowError("rejected", "another response than 'chosen'", Found("the same"))
        if isinstance(result, RowError):
            return self.reject(row, result)
        self.report.rows += 1
        self.report.truncated_prompts += result.prompt_truncated
        self.report.truncated_responses += result.responses_truncated
        responses = dict(zip(self.response_columns, result.response_ids, strict=True))
        return {"prompt": result.prompt, "prompt_ids": result.prompt_ids, **responses}

    def reject(self, row: Row, problem: RowError) -> None:
        if not self.skip_bad_records:
            raise problem.at(row.file, row.number) from problem
        self.report.skipped += 1
        self.report.reasons[problem.reason] += 1


def is_equal_pair(responses: list[list[int]]) -> bool:
    return len(responses) == 2 and responses[0] == responses[1]


def new_arrow_file() -> str:
    """A file that lives as long as the process; none is reused, for ids depend on the tokenizer's every setting."""
    with tempfile.NamedTemporaryFile(dir=scratch_folder().name, suffix=".arrow", delete=False) as file:
        return file.name


@functools.cache
def scratch_folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="fastp3o-data-")
