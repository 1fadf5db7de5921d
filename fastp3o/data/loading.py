"""Loads records as examples of a memory-mapped Dataset, and reports what was truncated or skipped."""

import hashlib
import json
import mmap
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
from datasets import Dataset, Features, List, Value
from transformers import PreTrainedTokenizerBase as Tokenizer

from fastp3o.config import LONGEST_TEXT
from fastp3o.data.encoding import TEMPLATE_FIELDS, Encoded, Encoder, ResponseEnds, Texts
from fastp3o.data.errors import DataError, Found, RecordError, field_names
from fastp3o.data.layouts import (
    DEMONSTRATION_LAYOUTS,
    LAYOUTS,
    RANKINGS,
    UNPAIRED_PREFERENCES,
    Fields,
    Layout,
    Part,
    desirable,
    find_layout,
    margin,
    probability,
    require_preferred,
)
from fastp3o.data.sources import Record, read_records
from fastp3o.errors import UserError
from fastp3o.files import naming
from fastp3o.runtime.clock import Clock
from fastp3o.sources import Source

BATCH = 1000  # records tokenized at once
IDS = List(Value("int32"))
PROMPT_COLUMNS = ("prompt", "prompt_ids", "given")

# Further fields to keep of each record, by name; the values say, in a message's words, what asks
# for the field.
Asked = Mapping[str, str]


# --- what is told of the data ---------------------------------------------------------------------


@dataclass
class DataReport:
    """Counts of one pass over a source.

    examples: usable records, which are the entries of the data set. truncated_prompts,
    truncated_responses: texts cut at a limit; both responses of a pair may count. changed_replies:
    messages that the chat template trims, or writes otherwise than they are. repeated_prompts:
    records of text whose responses all begin with the whole prompt. special_texts: texts that hold
    the text of a special token, such as a written end of sequence. skipped: records that cannot be
    used. reasons: how many were skipped for each reason. unread: fields with values that nothing
    reads, in their order, those of messages last. templated: whether the chat template wrote any of
    the texts. clock: what it read for the time; "" if it reads none.
    """

    examples: int = 0
    truncated_prompts: int = 0
    truncated_responses: int = 0
    changed_replies: int = 0
    repeated_prompts: int = 0
    special_texts: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    unread: dict[str, None] = field(default_factory=dict)
    templated: bool = False
    clock: str = ""

    def __str__(self) -> str:
        cut = f"{self.truncated_prompts} prompts and {self.truncated_responses} responses truncated"
        if self.special_texts:
            cut += f", {self.special_texts} texts with the name of a special token, which is text"
        if self.changed_replies:
            cut += f", {self.changed_replies} replies that the chat template trims or changes"
        why = "; ".join(f"{count} × {reason}" for reason, count in self.reasons.most_common())
        unread = f"; nothing reads {field_names(self.unread)}" if self.unread else ""
        skipped = f"{self.skipped} records skipped" + (f" ({why})" if why else "")
        twice = (
            f"; responses of {self.repeated_prompts} records repeat the prompt"
            if self.repeated_prompts
            else ""
        )
        day = "which stays so; at another time the same seed has other texts"
        clock = f"; the chat template reads the time, {self.clock}, {day}" if self.clock else ""
        return f"{self.examples} examples, {cut}, {skipped}{twice}{unread}{clock}"


Loaded = tuple[Dataset, DataReport]


# --- one function for each kind of data -----------------------------------------------------------


def load_prompts(
    source: Source,
    tokenizer: Tokenizer,
    *,
    columns: Asked | None = None,
    as_given: bool = False,
    **options: Any,
) -> Loaded:
    """The prompts of any layout (README.md lists them), for the online stage, and the report.

    source: any that README.md lists, or records. columns: further fields, which every record must
    have, kept as JSON text; `column_values` reads it. as_given: also keep the column `given`: the
    record's fields that say its prompt, not truncated, as JSON text: `prompt` (a string or a list
    of messages), `tools` and `chat_template_kwargs`. options: see `Loader`.

    The other columns are `prompt` (str, the text as the model sees it: after the chat template,
    without a truncated beginning, without the token that the tokenizer itself puts first) and
    `prompt_ids` (list of int32). Raises DataError if the source cannot be read, or a record or none
    can be used; ValueError if a limit leaves no room, a field is asked for that has the name of a
    column, or the tokenizer lacks responses' end-of-sequence token.
    """
    columns = columns or {}
    for name in PROMPT_COLUMNS:
        if name in columns:
            raise UserError(
                f"{columns[name]} asks for the column '{name}', which is the prompt itself"
            )
    return Loader(
        tokenizer, {}, max_response_tokens=None, columns=columns, as_given=as_given, **options
    ).load(source)


# The others add columns of responses to `prompt` and `prompt_ids`, and take and raise what
# `load_prompts` does. A response longer than `max_response_tokens` loses its end and is counted;
# any other ends with an end-of-sequence token.


def load_demonstrations(source: Source, tokenizer: Tokenizer, **options: Any) -> Loaded:
    """`response_ids` (list of int32): one response, for SFT. A preference gives its chosen one.
    Plain text, the field `text`, is the response to the tokens that the tokenizer puts first, or to
    its own first token.
    """
    return Loader(tokenizer, {"response_ids": IDS}, DEMONSTRATION_LAYOUTS, **options).load(source)


def load_preferences(source: Source, tokenizer: Tokenizer, **options: Any) -> Loaded:
    """`chosen_ids`, `rejected_ids`. A record whose two responses are equal, also once truncated,
    cannot be used.
    """
    return Loader(tokenizer, {"chosen_ids": IDS, "rejected_ids": IDS}, **options).load(source)


def load_rankings(source: Source, tokenizer: Tokenizer, **options: Any) -> Loaded:
    """`ranked_ids` (list of lists of int32): two responses or more, from best to worst, for the
    reward model. `margin` (float64): by how much the chosen response of a preference is better, 0
    if the record has none. `probability` (float64): that it is better, 1 if the record has none.
    """
    labels = {"margin": (Value("float64"), margin), "probability": (Value("float64"), probability)}
    return Loader(tokenizer, {"ranked_ids": List(IDS)}, RANKINGS, labels, **options).load(source)


def load_unpaired_preferences(source: Source, tokenizer: Tokenizer, **options: Any) -> Loaded:
    """`response_ids` and `desirable` (bool), for KTO: `prompt, completion, label` with a boolean
    label.
    """
    labels = {"desirable": (Value("bool"), desirable)}
    return Loader(tokenizer, {"response_ids": IDS}, UNPAIRED_PREFERENCES, labels, **options).load(
        source
    )


# --- from records to a data set -------------------------------------------------------------------


@dataclass
class Loader:
    """One pass over the records of a source.

    response_columns: the columns of an example's first responses, or one of all of them, with their
    types. labels: columns of other values of a record, with their types and what reads them. split:
    the split of a hub data set or a folder; files have only "train". max_prompt_tokens: longer
    prompts lose their beginning and are counted. max_response_tokens: longer responses lose their
    end and are counted; None without responses. max_characters: longest prompt or response; a
    record with a longer one cannot be used. skip_bad_records: skip and count records that cannot be
    used, instead of stopping at the first. limit: stop reading after this many usable records.
    chat_template_kwargs: variables of the chat template (`enable_thinking`), where a record's own
    do not say otherwise. ends: what ends responses of the model; by default what the tokenizer
    alone says. clock: that the template reads, by default the process's. observation_role: of
    messages that will follow replies, which the template must write with a record's variables.
    tools: schemas of the run's functions, which every prompt of messages has in place of its
    own field `tools`. all_turns: an example of each assistant's turn in `messages` that follows a
    user's or a tool's.
    """

    tokenizer: Tokenizer
    response_columns: dict[str, Any]
    layouts: Sequence[Layout] = LAYOUTS
    labels: Mapping[str, tuple[Value, Callable[[Fields], Any]]] = field(default_factory=dict)
    _: KW_ONLY
    split: str = "train"
    max_prompt_tokens: int
    max_response_tokens: int | None
    max_characters: int = LONGEST_TEXT
    skip_bad_records: bool = False
    limit: int | None = None
    columns: Asked = field(default_factory=dict)
    as_given: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None
    ends: ResponseEnds | None = None
    clock: Clock | None = None
    observation_role: str | None = None
    tools: list[Fields] = field(default_factory=list)
    all_turns: bool = False

    def __post_init__(self) -> None:
        lengths = (self.max_prompt_tokens, self.max_response_tokens, self.max_characters)
        self.encoder = Encoder(
            self.tokenizer, *lengths, self.chat_template_kwargs, self.ends, self.clock
        )
        self.report = DataReport()
        self.takes_all = self.layouts is RANKINGS  # of a record's responses, in one column
        self.examples: Counter[str] = Counter()  # by their file
        self.repeated: Counter[str] = Counter()
        # Variables with which the template leaves replies as they are.
        self.continued: set[str] = set()

    # --- the data set -----------------------------------------------------------------------------

    def load(self, source: Source) -> Loaded:
        """Writes the examples to an Arrow file as they come, so that memory holds one batch of
        them. The file has no name: nothing is left of it, whatever ends the process. The data set's
        fingerprint is a hash of its examples.
        """
        kept = dict.fromkeys(
            [*(["given"] if self.as_given else []), *self.columns], Value("string")
        )
        kept |= {name: kind for name, (kind, _) in self.labels.items()}
        columns = {"prompt": Value("string"), "prompt_ids": IDS, **self.response_columns, **kept}
        schema = Features(columns).arrow_schema
        digest = hashlib.sha256()
        with (
            naming(Path(tempfile.gettempdir())),
            tempfile.TemporaryFile(prefix="fastp3o-data-") as file,
        ):
            with pa.ipc.new_stream(pa.PythonFile(file, mode="w"), schema) as writer:
                for batch in self.example_batches(read_records(source, self.split)):
                    digest.update("".join(map(repr, batch)).encode(errors="surrogatepass"))
                    writer.write_table(pa.Table.from_pylist(batch, schema=schema))
            self.report.unread |= dict.fromkeys(
                f"{name} of messages" for name in self.encoder.template.unread
            )
            self.require_prompts_once()
            if not self.report.examples:
                raise DataError(
                    f"{source}: expected at least one usable record, got none ({self.report})"
                )
            file.flush()
            # The mapping outlives the file.
            examples = pa.ipc.open_stream(
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            ).read_all()
        return Dataset(examples, fingerprint=digest.hexdigest()), self.report

    def require_prompts_once(self) -> None:
        """Raises DataError if all responses of a file repeat their prompts. A few may begin like
        that for a reason.
        """
        for file, count in self.repeated.items():
            if count == self.examples[file] > 1:
                raise DataError(
                    f"{file}: expected responses without the prompt before them, got one that begins with the whole "
                    f"prompt in each of {count} records: the prompt would be trained on twice. Cut it off the responses"
                )

    def example_batches(self, records: Iterator[Record]) -> Iterator[list[dict]]:
        readable = self.readable(records)
        # Within the limit, so that no bad record past it stops the run.
        while batch := list(
            islice(readable, min(BATCH, (self.limit or sys.maxsize) - self.report.examples))
        ):
            encoded = self.encoder.encode([texts for _, texts, _ in batch])
            examples = [
                self.example(*read, result) for read, result in zip(batch, encoded, strict=True)
            ]
            yield [example for example in examples if example is not None]

    # --- one record after the other ---------------------------------------------------------------

    def readable(self, records: Iterator[Record]) -> Iterator[tuple[Record, Texts, dict[str, Any]]]:
        """The records that fit the layout of their file, with their texts and the further values
        that are kept.
        """
        layouts: dict[str, Layout] = {}
        for record in chain.from_iterable(map(self.turns, records)):
            try:
                texts = self.read(record, layouts)
                content = cast(Fields, record.content)
                kept = {name: read(content) for name, (_, read) in self.labels.items()}
                if self.as_given:
                    kept["given"] = json_text(
                        texts.given, texts.fields[0], "a prompt that JSON has, in UTF-8"
                    )
                kept |= fields_json(content, self.columns)
            except RecordError as problem:
                self.reject(record, problem)
            else:
                yield record, texts, kept

    def turns(self, record: Record) -> list[Record]:
        """The record once for each turn that trains, up to it."""
        conversation = (
            record.content.get("messages")
            if self.all_turns and isinstance(record.content, dict)
            else None
        )
        if not isinstance(conversation, list):
            return [record]
        roles = [
            message.get("role") if isinstance(message, dict) else None for message in conversation
        ]
        ends = [
            n
            for n in range(2, len(roles) + 1)
            if roles[n - 1] == "assistant" and roles[n - 2] in ("user", "tool")
        ]
        content = cast(dict, record.content)
        return [
            record._replace(content=content | {"messages": conversation[:end]}) for end in ends
        ] or [record]

    def read(self, record: Record, layouts: dict[str, Layout]) -> Texts:
        """Reads a record by its file's layout, which the first record that has one decides for the
        whole file.
        """
        content = record.content
        if isinstance(content, RecordError):
            raise content
        if not isinstance(content, Mapping):
            raise RecordError(None, "an object", content)
        if record.file not in layouts:
            least = 2 if self.takes_all else len(self.response_columns)
            layouts[record.file] = find_layout(content, least, self.layouts)
        layout = layouts[record.file]
        prompt = layout.prompt(content)
        if not isinstance(prompt.value, str) and self.tokenizer.chat_template is None:
            place = f"{record.file} record {record.number}"
            raise DataError(
                f"{place}: holds messages, and the tokenizer has no chat template (see --chat_template)"
            )
        if self.tools:
            content = self.with_tools(record, prompt)
        responses = layout.responses(content) if self.response_columns else ()
        if layout.response_count == 2 and self.response_columns and not self.takes_all:
            require_preferred(content)
        responses = responses if self.takes_all else responses[: len(self.response_columns)]
        texts = self.encoder.render(prompt, responses, content)
        template = self.encoder.template
        fields = {name: texts.given[name] for name in TEMPLATE_FIELDS if name in texts.given}
        if (
            self.observation_role
            and fields
            and (once := json.dumps(fields, default=str)) not in self.continued
        ):
            template.between_turns(self.observation_role, template.variables(content))
            self.continued.add(once)
        read = {
            *layout.fields,
            *self.columns,
            *self.labels,
            *(TEMPLATE_FIELDS if texts.templated else ()),
        }
        has_value = (name for name, value in content.items() if value is not None)
        self.report.templated |= texts.templated
        if texts.templated and template.reads_clock:
            self.report.clock = str(template.clock)
        self.report.unread |= dict.fromkeys(name for name in has_value if name not in read)
        return texts

    def with_tools(self, record: Record, prompt: Part) -> Fields:
        """The record's fields with the run's tools. Raises RecordError for one that has others, and
        DataError for a prompt that no chat template could tell of them.
        """
        content, place = cast(Fields, record.content), f"{record.file} record {record.number}"
        if isinstance(prompt.value, str):
            if self.observation_role is None:
                return content
            raise DataError(
                f"{place}: the prompt is text, and only a chat template tells the policy of --tools: give messages, or "
                "describe the tools in the text and set --observation_role text"
            )
        if not self.encoder.template.reads("tools", self.tools):
            raise DataError(
                f"{place}: the chat template does not read `tools`: --chat_template names one that does"
            )
        if content.get("tools"):
            raise RecordError(
                "tools", "none, since only the run's --tools are answered", content["tools"]
            )
        return {**content, "tools": self.tools}

    def example(
        self, record: Record, texts: Texts, kept: dict[str, Any], result: Encoded | RecordError
    ) -> dict | None:
        """Counts the record and returns its example, None if it was skipped."""
        if isinstance(result, RecordError):
            self.reject(record, result)
            return None
        self.report.examples += 1
        self.report.truncated_prompts += result.prompt_truncated
        self.report.truncated_responses += result.responses_truncated
        self.report.special_texts += result.special_texts
        self.report.changed_replies += texts.changed
        self.examples[record.file] += 1
        prompt = "" if texts.templated else texts.prompt.rstrip()
        if prompt and texts.responses and all(text.startswith(prompt) for text in texts.responses):
            self.report.repeated_prompts += 1
            self.repeated[record.file] += 1
        responses = [result.response_ids] if self.takes_all else result.response_ids
        columns = dict(zip(self.response_columns, responses, strict=True))
        return {"prompt": result.prompt, "prompt_ids": result.prompt_ids, **columns, **kept}

    def reject(self, record: Record, problem: RecordError) -> None:
        """Counts the record as skipped, or raises DataError if none may be."""
        if not self.skip_bad_records:
            raise problem.at(record.file, record.number) from problem
        self.report.skipped += 1
        self.report.reasons[problem.reason] += 1


# --- columns that rewards and environments ask for ------------------------------------------------


def fields_json(record: Fields, asked: Asked) -> dict[str, str]:
    """The fields as JSON text. Raises RecordError for a field that is missing, null, or no JSON
    value.
    """
    texts = {}
    for name, asker in asked.items():
        value = record.get(name)
        if value is None:
            reason = "null" if name in record else f"nothing: the record has {field_names(record)}"
            raise RecordError(name, f"a value, which {asker} asks for", Found(reason))
        texts[name] = json_text(
            value, name, f"a value that JSON has, which {asker} asks for", ensure_ascii=True
        )
    return texts


def json_text(value: object, field: str, expected: str, *, ensure_ascii: bool = False) -> str:
    """Raises RecordError for a value that JSON in UTF-8 cannot hold."""
    try:
        text = json.dumps(value, ensure_ascii=ensure_ascii, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(field, expected, value) from error
    return text


def column_values(examples: Mapping[str, list]) -> dict[str, list]:
    """The values of the further fields that a batch of examples keeps."""
    return {
        name: list(map(json.loads, texts))
        for name, texts in examples.items()
        if name not in PROMPT_COLUMNS
    }
