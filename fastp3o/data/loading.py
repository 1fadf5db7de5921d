"""The loaders: records -> examples in a memory-mapped Dataset, and a report of what was truncated or skipped."""

import hashlib
import mmap
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import cast

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from fastp3o.data.encoding import LONGEST_TEXT, Encoded, Encoder, Texts
from fastp3o.data.errors import DataError, Found, RecordError, UnskippableError
from fastp3o.data.layouts import LAYOUTS, UNPAIRED_PREFERENCES, Fields, Layout, desirable, find_layout
from fastp3o.data.sources import Record, read_records

BATCH = 1000  # records tokenised at once


@dataclass
class DataReport:
    """What loading did.

    examples: entries of the data set, one a usable record.
    truncated_prompts, truncated_responses: texts cut at a limit; both responses of a pair may count.
    special_texts: texts that hold what looks like a special token, such as a written end of sequence, and is text.
    skipped: records that cannot be used.
    reasons: how many of these for each reason.
    """

    examples: int = 0
    truncated_prompts: int = 0
    truncated_responses: int = 0
    special_texts: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        cut = f"{self.truncated_prompts} prompts and {self.truncated_responses} responses truncated"
        if self.special_texts:
            cut += f", {self.special_texts} texts with the name of a special token, which is text"
        why = "; ".join(f"{count} × {reason}" for reason, count in self.reasons.most_common())
        return f"{self.examples} examples, {cut}, {self.skipped} records skipped" + (f" ({why})" if why else "")


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    max_characters: int = LONGEST_TEXT,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """The prompts of any layout (README.md lists them).

    Args:
        source: a hub name ("owner/name" or "owner/name:config"), a .jsonl, .json (both also .gz) or .parquet file, a
            glob, or a folder. Of a folder with files named after splits, those of `split` are read.
        split: the split of a hub data set or a folder; files have "train" alone.
        max_prompt_tokens: longer prompts lose their beginning and are counted.
        max_characters: of a prompt or a response; a record with more cannot be used.
        skip_bad_records: skip and count records that cannot be used, instead of stopping at the first.
        limit: stop reading after this many usable records.

    Returns:
        Dataset with the columns `prompt` (str, the text as the model sees it: after the chat template, without a
        truncated beginning, without the token that the tokenizer itself puts first) and `prompt_ids` (list of int32);
        and the report.

    Raises:
        DataError: the source cannot be read, a record cannot be used, or none can.
        ValueError: a limit leaves no room.
    """
    encoder = Encoder(tokenizer, max_prompt_tokens, None, max_characters)
    return Loading(encoder, (), skip_bad_records, limit).load(source, split)


def load_demonstrations(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    max_response_tokens: int,
    max_characters: int = LONGEST_TEXT,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Prompts with one response each, for SFT; of a preference pair, the chosen one. Arguments as in `load_prompts`.

    Returns:
        Dataset with the columns `prompt`, `prompt_ids` and `response_ids` (list of int32); and the report.
        `response_ids` ends with the end-of-sequence token, unless the response was truncated to `max_response_tokens`
        (the end-of-sequence token counts).

    Raises:
        DataError, ValueError: as `load_prompts`; also where the tokenizer has no end-of-sequence token.
    """
    encoder = Encoder(tokenizer, max_prompt_tokens, max_response_tokens, max_characters)
    return Loading(encoder, ("response_ids",), skip_bad_records, limit).load(source, split)


def load_preferences(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    max_response_tokens: int,
    max_characters: int = LONGEST_TEXT,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Prompts with a chosen and a rejected response. Arguments as in `load_prompts`.

    Returns:
        Dataset with the columns `prompt`, `prompt_ids`, `chosen_ids` and `rejected_ids`; and the report. Responses end
        as in `load_demonstrations`. Records whose two responses are equal (also once truncated) cannot be used.

    Raises:
        DataError, ValueError: as `load_demonstrations`.
    """
    encoder = Encoder(tokenizer, max_prompt_tokens, max_response_tokens, max_characters)
    return Loading(encoder, ("chosen_ids", "rejected_ids"), skip_bad_records, limit).load(source, split)


def load_unpaired_preferences(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    split: str = "train",
    max_prompt_tokens: int,
    max_response_tokens: int,
    max_characters: int = LONGEST_TEXT,
    skip_bad_records: bool = False,
    limit: int | None = None,
) -> tuple[Dataset, DataReport]:
    """Prompts with one response that is desirable or not, for KTO: `prompt, completion, label` with a boolean label.
    Arguments as in `load_prompts`.

    Returns:
        Dataset with the columns `prompt`, `prompt_ids`, `response_ids` and `desirable` (bool); and the report.
        Responses end as in `load_demonstrations`.

    Raises:
        DataError, ValueError: as `load_demonstrations`.
    """
    encoder = Encoder(tokenizer, max_prompt_tokens, max_response_tokens, max_characters)
    labels = {"desirable": desirable}
    loading = Loading(encoder, ("response_ids",), skip_bad_records, limit, UNPAIRED_PREFERENCES, labels)
    return loading.load(source, split)


@dataclass(frozen=True)
class Loading:
    """One pass over the records of a source; loaders differ in the columns that hold responses, and labels of them.

    layouts: that are accepted. labels: further columns, of what the records say without tokens.
    """

    encoder: Encoder
    response_columns: tuple[str, ...]
    skip_bad_records: bool
    limit: int | None
    layouts: Sequence[Layout] = LAYOUTS
    labels: Mapping[str, Callable[[Fields], bool]] = field(default_factory=dict)
    report: DataReport = field(default_factory=DataReport)

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit must be at least 1, got {self.limit}")

    def load(self, source: str, split: str) -> tuple[Dataset, DataReport]:
        """Writes the examples to an Arrow file as they come, so that memory holds one batch of them. The file has no
        name: whatever ends the process, nothing is left of it. The data set's fingerprint is a hash of its examples.
        """
        ids = List(Value("int32"))
        columns = {"prompt": Value("string"), "prompt_ids": ids, **dict.fromkeys(self.response_columns, ids)}
        columns |= dict.fromkeys(self.labels, Value("bool"))
        schema = Features(columns).arrow_schema
        digest = hashlib.sha256()
        with tempfile.TemporaryFile(prefix="fastp3o-data-") as file:
            with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema) as writer:
                for batch in self.example_batches(read_records(str(source), split)):
                    digest.update("".join(map(repr, batch)).encode(errors="surrogatepass"))
                    writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            if not self.report.examples:
                raise DataError(f"{source}: expected at least one usable record, got none ({self.report})")
            file.flush()
            # The mapping outlives the file.
            examples = pa.ipc.open_stream(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)).read_all()
        return Dataset(examples, fingerprint=digest.hexdigest()), self.report

    def example_batches(self, records: Iterator[Record]) -> Iterator[list[dict]]:
        readable = self.readable(records)
        while batch := list(islice(readable, self.batch_size())):
            encoded = self.encoder.encode([texts for _, texts in batch])
            examples = [self.example(record, result) for (record, _), result in zip(batch, encoded, strict=True)]
            yield [example for example in examples if example is not None]

    def batch_size(self) -> int:
        """Records to encode next: never so many that a bad record past the limit could stop the run."""
        return BATCH if self.limit is None else min(BATCH, self.limit - self.report.examples)

    def readable(self, records: Iterator[Record]) -> Iterator[tuple[Record, Texts]]:
        """The records that fit the layout of their file, with their texts."""
        layouts: dict[str, Layout] = {}
        for record in records:
            try:
                texts = self.read(record, layouts)
            except RecordError as problem:
                self.reject(record, problem)
            else:
                yield record, texts

    def read(self, record: Record, layouts: dict[str, Layout]) -> Texts:
        """Reads a record by its file's layout. The first record that has one decides it for the whole file."""
        if isinstance(record.content, RecordError):
            raise record.content
        if not isinstance(record.content, Mapping):
            raise RecordError(None, "an object", record.content)
        if record.file not in layouts:
            layouts[record.file] = find_layout(record.content, len(self.response_columns), self.layouts)
        layout = layouts[record.file]
        prompt = layout.prompt(record.content)
        if not isinstance(prompt.value, str) and self.encoder.tokenizer.chat_template is None:
            raise DataError(
                f"{record.file} record {record.number}: holds messages, and the tokenizer has no chat template"
            )
        responses = layout.responses(record.content) if self.response_columns else ()
        return self.encoder.render(prompt, responses[: len(self.response_columns)])

    def example(self, record: Record, result: Encoded | RecordError) -> dict | None:
        """The record's example, counted; None where the record was skipped."""
        if isinstance(result, Encoded) and is_equal_pair(result.response_ids):
            result = RecordError("rejected", "another response than 'chosen'", Found("the same"))
        if isinstance(result, RecordError):
            self.reject(record, result)
            return None
        self.report.examples += 1
        self.report.truncated_prompts += result.prompt_truncated
        self.report.truncated_responses += result.responses_truncated
        self.report.special_texts += result.special_texts
        responses = dict(zip(self.response_columns, result.response_ids, strict=True))
        labels = {name: read(cast(Fields, record.content)) for name, read in self.labels.items()}
        return {"prompt": result.prompt, "prompt_ids": result.prompt_ids, **responses, **labels}

    def reject(self, record: Record, problem: RecordError) -> None:
        """Counts the record as skipped, or raises DataError where none may be."""
        if not self.skip_bad_records or isinstance(problem, UnskippableError):
            raise problem.at(record.file, record.number) from problem
        self.report.skipped += 1
        self.report.reasons[problem.reason] += 1


def is_equal_pair(responses: list[list[int]]) -> bool:
    return len(responses) == 2 and responses[0] == responses[1]
