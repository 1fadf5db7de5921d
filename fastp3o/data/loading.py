"""Loads records as examples of a memory-mapped Dataset, and reports what was truncated or skipped."""

import hashlib
import json
import mmap
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, Required, TypedDict, Unpack, cast

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase

from fastp3o.config import LONGEST_TEXT
from fastp3o.data.encoding import Encoded, Encoder, Texts
from fastp3o.data.errors import DataError, Found, RecordError, UnskippableError, field_names
from fastp3o.data.layouts import (
    RANKINGS,
    UNPAIRED_PREFERENCES,
    Fields,
    Layout,
    Message,
    Part,
    desirable,
    find_layout,
    margin,
)
from fastp3o.data.sources import Record, read_records
from fastp3o.errors import UserError

BATCH = 1000  # records tokenised at once
IDS = List(Value("int32"))
PROMPT_COLUMNS = ("prompt", "prompt_ids", "given")

# Further fields to keep of each record, by name; the values say, in a message's words, what asks for the field.
Asked = Mapping[str, str]


@dataclass
class DataReport:
    """Counts of one pass over a source.

    examples: usable records, which are the entries of the data set.
    truncated_prompts, truncated_responses: texts cut at a limit; both responses of a pair may count.
    special_texts: texts that hold the text of a special token, such as a written end of sequence.
    skipped: records that cannot be used.
    reasons: how many records were skipped for each reason.
    margins: examples with a margin above 0, if the stage uses margins.
    """

    examples: int = 0
    truncated_prompts: int = 0
    truncated_responses: int = 0
    special_texts: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    margins: int = 0

    def __str__(self) -> str:
        cut = f"{self.truncated_prompts} prompts and {self.truncated_responses} responses truncated"
        if self.special_texts:
            cut += f", {self.special_texts} texts with the name of a special token, which is text"
        if self.margins:
            cut += f", {self.margins} with a margin"
        why = "; ".join(f"{count} × {reason}" for reason, count in self.reasons.most_common())
        return f"{self.examples} examples, {cut}, {self.skipped} records skipped" + (f" ({why})" if why else "")


class Options(TypedDict, total=False):
    """Options of all loaders.

    split: the split of a hub data set or a folder; files have only "train", the default.
    max_prompt_tokens: longer prompts lose their beginning and are counted.
    max_characters: longest prompt or response, LONGEST_TEXT by default; a record with a longer one cannot be used.
    skip_bad_records: skip and count records that cannot be used, instead of stopping at the first.
    limit: stop reading after this many usable records.
    """

    split: str
    max_prompt_tokens: Required[int]
    max_characters: int
    skip_bad_records: bool
    limit: int | None


Loaded = tuple[Dataset, DataReport]


def load_prompts(
    source: str,
    tokenizer: PreTrainedTokenizerBase,
    *,
    columns: Asked | None = None,
    as_given: bool = False,
    **options: Unpack[Options],
) -> Loaded:
    """The prompts of any layout (README.md lists them), for the online stage.

    Args:
        source: a hub name ("owner/name" or "owner/name:config"), a .jsonl, .json (both also .gz) or .parquet file, a
            glob, or a folder, of whose files those of `split` are read. Or records.
        columns: further fields to keep. Every record must have them.
        as_given: also keep the column `given`: the prompt as its record has it, not truncated, as JSON text (a string,
            or a list of messages).
        options: see `Options`.

    Returns:
        Dataset with the columns `prompt` (str, the text as the model sees it: after the chat template, without a
        truncated beginning, without the token that the tokenizer itself puts first), `prompt_ids` (list of int32), and
        those of `columns` (JSON text, which `column_values` reads); and the report.

    Raises:
        DataError: the source cannot be read, a record cannot be used, or none can.
        ValueError: a limit leaves no room, a field is asked for that has the name of a column, or the tokenizer lacks
            the end-of-sequence token of responses.
    """
    columns = columns or {}
    for name in PROMPT_COLUMNS:
        if name in columns:
            raise UserError(f"{columns[name]} asks for the column '{name}', which is the prompt itself")
    return Loader(tokenizer, (), None, columns=columns, as_given=as_given, **options).load(source)


# The others add columns of responses to `prompt` and `prompt_ids`, and take and raise what `load_prompts` does. A
# response longer than `max_response_tokens` loses its end and is counted; any other ends with an end-of-sequence token.


def load_demonstrations(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int, **options: Unpack[Options]
) -> Loaded:
    """`response_ids` (list of int32): one response, for SFT. A preference gives its chosen one."""
    return Loader(tokenizer, ("response_ids",), max_response_tokens, **options).load(source)


def load_preferences(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int, **options: Unpack[Options]
) -> Loaded:
    """`chosen_ids`, `rejected_ids`. A record whose two responses are equal, also once truncated, cannot be used."""
    return Loader(tokenizer, ("chosen_ids", "rejected_ids"), max_response_tokens, **options).load(source)


def load_rankings(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int, **options: Unpack[Options]
) -> Loaded:
    """`ranked_ids` (list of lists of int32): two responses or more, from best to worst, for the reward model; and
    `margin` (float64), by which the chosen response of a preference is better, 0 if the record has none.
    """
    return RankingLoader(tokenizer, (), max_response_tokens, **options).load(source)


def load_unpaired_preferences(
    source: str, tokenizer: PreTrainedTokenizerBase, *, max_response_tokens: int, **options: Unpack[Options]
) -> Loaded:
    """`response_ids` and `desirable` (bool), for KTO: `prompt, completion, label` with a boolean label."""
    return UnpairedLoader(tokenizer, ("response_ids",), max_response_tokens, **options).load(source)


@dataclass
class Loader:
    """One pass over the records of a source. response_columns: the columns of an example's first responses."""

    tokenizer: PreTrainedTokenizerBase
    response_columns: tuple[str, ...]
    max_response_tokens: int | None
    _: KW_ONLY
    split: str = "train"
    max_prompt_tokens: int
    max_characters: int = LONGEST_TEXT
    skip_bad_records: bool = False
    limit: int | None = None
    columns: Asked = field(default_factory=dict)
    as_given: bool = False

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise UserError(f"limit must be at least 1, got {self.limit}")
        lengths = (self.max_prompt_tokens, self.max_response_tokens, self.max_characters)
        self.encoder, self.report = Encoder(self.tokenizer, *lengths), DataReport()

    def load(self, source: str) -> Loaded:
        """Writes the examples to an Arrow file as they come, so that memory holds one batch of them. The file has no
        name: nothing is left of it, whatever ends the process. The data set's fingerprint is a hash of its examples.
        """
        kept = dict.fromkeys([*(["given"] if self.as_given else []), *self.columns], Value("string"))
        schema = Features({"prompt": Value("string"), "prompt_ids": IDS, **self.features(), **kept}).arrow_schema
        digest = hashlib.sha256()
        with tempfile.TemporaryFile(prefix="fastp3o-data-") as file:
            with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema) as writer:
                for batch in self.example_batches(read_records(source, self.split)):
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
        # Within the limit, so that no bad record past it stops the run.
        while batch := list(islice(readable, min(BATCH, (self.limit or sys.maxsize) - self.report.examples))):
            encoded = self.encoder.encode([texts for _, texts, _ in batch])
            examples = [self.example(*read, result) for read, result in zip(batch, encoded, strict=True)]
            yield [example for example in examples if example is not None]

    def readable(self, records: Iterator[Record]) -> Iterator[tuple[Record, Texts, dict[str, str]]]:
        """The records that fit the layout of their file, with their texts and the further fields that are kept."""
        layouts: dict[str, Layout] = {}
        for record in records:
            try:
                texts = self.read(record, layouts)
                prompt = {"given": prompt_json(texts.given, texts.fields[0])} if self.as_given else {}
                kept = prompt | fields_json(cast(Fields, record.content), self.columns)
            except RecordError as problem:
                self.reject(record, problem)
            else:
                yield record, texts, kept

    def read(self, record: Record, layouts: dict[str, Layout]) -> Texts:
        """Reads a record by its file's layout, which the first record that has one decides for the whole file."""
        if isinstance(record.content, RecordError):
            raise record.content
        if not isinstance(record.content, Mapping):
            raise RecordError(None, "an object", record.content)
        if record.file not in layouts:
            layouts[record.file] = self.find_layout(record.content)
        layout = layouts[record.file]
        prompt = layout.prompt(record.content)
        if not isinstance(prompt.value, str) and self.tokenizer.chat_template is None:
            raise DataError(
                f"{record.file} record {record.number}: holds messages, and the tokenizer has no chat template"
            )
        return self.encoder.render(prompt, self.responses(record.content, layout))

    def example(self, record: Record, texts: Texts, kept: dict[str, str], result: Encoded | RecordError) -> dict | None:
        """Counts the record and returns its example, None if it was skipped."""
        problem = result if isinstance(result, RecordError) else equal_responses(texts, result)
        if isinstance(result, RecordError) or problem is not None:
            self.reject(record, cast(RecordError, problem))
            return None
        self.report.examples += 1
        self.report.truncated_prompts += result.prompt_truncated
        self.report.truncated_responses += result.responses_truncated
        self.report.special_texts += result.special_texts
        columns = self.response_values(cast(Fields, record.content), result)
        return {"prompt": result.prompt, "prompt_ids": result.prompt_ids, **columns, **kept}

    def reject(self, record: Record, problem: RecordError) -> None:
        """Counts the record as skipped, or raises DataError if none may be."""
        if not self.skip_bad_records or isinstance(problem, UnskippableError):
            raise problem.at(record.file, record.number) from problem
        self.report.skipped += 1
        self.report.reasons[problem.reason] += 1

    # Subclasses override the methods below.

    def features(self) -> dict[str, Any]:
        """The types of the columns after `prompt` and `prompt_ids`."""
        return dict.fromkeys(self.response_columns, IDS)

    def find_layout(self, record: Fields) -> Layout:
        return find_layout(record, len(self.response_columns))

    def responses(self, record: Fields, layout: Layout) -> tuple[Part, ...]:
        responses = layout.responses(record) if self.response_columns else ()
        return responses[: len(self.response_columns)]

    def response_values(self, record: Fields, result: Encoded) -> dict[str, Any]:
        """An example's values in the columns of `features`."""
        return dict(zip(self.response_columns, result.response_ids, strict=True))


class RankingLoader(Loader):
    """Loader of all responses of a record, in one column."""

    def features(self) -> dict[str, Any]:
        return {"ranked_ids": List(IDS), "margin": Value("float64")}

    def find_layout(self, record: Fields) -> Layout:
        return find_layout(record, 2, RANKINGS)

    def responses(self, record: Fields, layout: Layout) -> tuple[Part, ...]:
        margin(record)
        return layout.responses(record)

    def response_values(self, record: Fields, result: Encoded) -> dict[str, Any]:
        self.report.margins += margin(record) > 0
        return {"ranked_ids": result.response_ids, "margin": margin(record)}


class UnpairedLoader(Loader):
    """Loader of responses with their labels."""

    def features(self) -> dict[str, Any]:
        return super().features() | {"desirable": Value("bool")}

    def find_layout(self, record: Fields) -> Layout:
        return find_layout(record, 1, UNPAIRED_PREFERENCES)

    def response_values(self, record: Fields, result: Encoded) -> dict[str, Any]:
        return super().response_values(record, result) | {"desirable": desirable(record)}


def equal_responses(texts: Texts, encoded: Encoded) -> RecordError | None:
    """The error of a record with two equal responses; None if all differ."""
    for later, ids in enumerate(encoded.response_ids):
        earlier = encoded.response_ids.index(ids)
        if earlier < later:
            _, *fields = texts.fields
            return RecordError(fields[later], f"another response than '{fields[earlier]}'", Found("the same"))
    return None


# --- further fields, kept exactly as JSON text ----------------------------------------------------------------------


def fields_json(record: Fields, asked: Asked) -> dict[str, str]:
    """The fields as JSON text. Raises RecordError for a field that is missing, null, or no JSON value."""
    texts = {}
    for name, asker in asked.items():
        value = record.get(name)
        if value is None:
            found = "null" if name in record else f"nothing: the record has {field_names(record)}"
            raise RecordError(name, f"a value, which {asker} asks for", Found(found))
        try:
            texts[name] = json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(name, f"a value that JSON has, which {asker} asks for", value) from error
    return texts


def prompt_json(prompt: str | list[Message], field: str) -> str:
    """A prompt as JSON text. Raises RecordError if a message holds a value that JSON in UTF-8 cannot."""
    for number, message in enumerate([] if isinstance(prompt, str) else prompt):
        for name, value in message.items():
            try:
                json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
            except (TypeError, ValueError, RecursionError) as error:
                raise RecordError(f"{field}[{number}].{name}", "a value that JSON has, in UTF-8", value) from error
    return json.dumps(prompt, ensure_ascii=False)


def column_values(examples: Mapping[str, list]) -> dict[str, list]:
    """The values of the further fields that a batch of examples keeps."""
    return {
        name: [json.loads(text) for text in texts] for name, texts in examples.items() if name not in PROMPT_COLUMNS
    }
