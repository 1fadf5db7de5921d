"""Records are what their author wrote, whatever holds them: tables fill fields in with nulls, files
of JSON do not.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, Features, Json, List, Value

from fastp3o.data.errors import DataError
from fastp3o.data.loading import column_values, load_demonstrations, load_prompts
from fastp3o.data.sources import read_records
from fastp3o.sources import InMemory
from tests.fastp3o.data.test_encoding import byte_tokenizer
from tests.fastp3o.data.test_loading import jsonl
from tests.fastp3o.families import Family, every_chat_family

LIMITS = {"max_prompt_tokens": 2000, "max_response_tokens": 2000}


def tool(name: str, **properties: Any) -> dict:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def calling(name: str, **arguments: Any) -> dict:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


# No two records have the same fields, at any level.
RECORDS: list[dict] = [
    {
        "messages": [{"role": "user", "content": "weather?"}, calling("weather", city="Paris")],
        "tools": [tool("weather", city={"type": "string"})],
        "info": {"first": {"deep": [{"a": 1}]}},
    },
    {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "add"}]},
            calling("add", a=1, b=[{"c": 2}]),
        ],
        "tools": [tool("add", a={"type": "integer"}, b={"type": "array"}), tool("halt")],
        "chat_template_kwargs": {"date_string": "1 May"},
        "info": {"second": [], "text": "x"},
    },
    {
        "messages": [
            {"role": "user", "content": "Hi", "name": "Eve"},
            {"role": "assistant", "content": "Ho"},
        ],
        "info": {"first": {"deep": [{"b": 2}, {}]}},
    },
]
# As typed columns must have it: one type for the content of all messages, and no field without
# fields.
TYPED: list[dict] = [
    RECORDS[0],
    RECORDS[1]
    | {
        "messages": [{"role": "user", "content": "add"}, RECORDS[1]["messages"][1]],
        "tools": [RECORDS[1]["tools"][0]],
    },
    RECORDS[2] | {"info": {"first": {"deep": [{"b": 2}]}}},
]


def array(records: list[dict], folder: Path) -> str:
    (folder / "records.json").write_text(json.dumps(records))
    return str(folder / "records.json")


def rows(records: list[dict]) -> list[dict]:
    """With all columns in each: a table's are those of its first row."""
    columns = dict.fromkeys(name for record in records for name in record)
    return [dict.fromkeys(columns) | record for record in records]


def parquet(records: list[dict], folder: Path) -> str:
    pq.write_table(pa.Table.from_pylist(rows(records)), folder / "records.parquet")
    return str(folder / "records.parquet")


def from_json(records: list[dict], folder: Path) -> Dataset:
    lines = jsonl(folder, records)
    return datasets.load_dataset(
        "json", data_files=lines, split="train", cache_dir=str(folder / "cache")
    )


def parquet_of_json(records: list[dict], folder: Path) -> str:
    from_json(records, folder).to_parquet(str(folder / "json.parquet"))
    return str(folder / "json.parquet")


def with_json(records: list[dict], folder: Path) -> Dataset:
    kinds = {"prompt": Value("string"), "messages": List(Json()), "tools": List(Json())}
    kinds = {name: kinds.get(name, Json()) for name in rows(records)[0]}
    return Dataset.from_list(rows(records), features=Features(kinds))


def in_memory(made: Any) -> InMemory:
    return InMemory("<records>", made)


JSON_SOURCES: dict[str, Callable[[list[dict], Path], str]] = {
    "JSON Lines": lambda records, folder: jsonl(folder, records),
    "a JSON array": array,
    "a list": lambda records, folder: in_memory(records),
    "load_dataset of JSON": lambda records, folder: in_memory(from_json(records, folder)),
    "parquet of JSON": parquet_of_json,
    "a Dataset of JSON": lambda records, folder: in_memory(with_json(records, folder)),
}
TABLES: dict[str, Callable[[list[dict], Path], str]] = {
    "parquet": parquet,
    "Dataset.from_list": lambda records, folder: in_memory(Dataset.from_list(rows(records))),
    "a stream": lambda records, folder: in_memory(
        Dataset.from_list(rows(records)).to_iterable_dataset()
    ),
    "a stream without types": lambda records, folder: in_memory(
        Dataset.from_list(rows(records)).to_iterable_dataset().map(lambda record: record)
    ),
}


def present(record: dict) -> dict:
    """Without the columns that are null in a record, which count as missing."""
    return {name: value for name, value in record.items() if value is not None}


def contents(source: str) -> list[dict]:
    return [present(record.content) for record in read_records(source, "train")]


@pytest.mark.parametrize("name", [*JSON_SOURCES, *TABLES])
def test_a_table_has_the_records_that_were_put_in(tmp_path: Path, name: str):
    assert contents((JSON_SOURCES | TABLES)[name](TYPED, tmp_path)) == TYPED
    if name in JSON_SOURCES:
        assert contents(JSON_SOURCES[name](RECORDS, tmp_path)) == RECORDS


def test_a_hub_data_set_is_a_table_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *name, **options: Dataset.from_list(rows(TYPED))
    )
    assert contents("owner/name") == TYPED


@every_chat_family
def test_the_same_examples_come_of_every_source(tmp_path: Path, family: Family):
    """Or the same refusal, of templates that do not write calls or tools."""
    tokenizer, outcomes = family.tokenizer(), {}
    for name, make in (JSON_SOURCES | TABLES).items():
        (tmp_path / name).mkdir()
        source = make(TYPED, tmp_path / name)
        examples, report = load_demonstrations(source, tokenizer, skip_bad_records=True, **LIMITS)
        outcomes[name] = (examples.to_list(), report.reasons)
    assert len(outcomes["JSON Lines"][0]) >= 1
    for name, outcome in outcomes.items():
        assert outcome == outcomes["JSON Lines"], name


@pytest.mark.parametrize("name", [*JSON_SOURCES, *TABLES])
def test_columns_that_a_reward_asks_for_have_no_nulls_of_a_table(tmp_path: Path, name: str):
    source = (JSON_SOURCES | TABLES)[name](
        [{"prompt": "Hi", "info": one["info"]} for one in TYPED], tmp_path
    )
    examples, _ = load_prompts(
        source, byte_tokenizer(), max_prompt_tokens=9, columns={"info": "a reward"}
    )
    assert column_values(examples[:])["info"] == [one["info"] for one in TYPED]


WRITES_ALL = (
    "{{ tools | tojson }}{{ unit | tojson }}{% for m in messages %}{% if m.role == 'assistant' %}>{% endif %}"
    "{{ m.content }}{{ (m.tool_calls or []) | tojson }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize("name", JSON_SOURCES)
def test_a_null_of_an_author_stays(tmp_path: Path, name: str):
    """In arguments, schemas and variables, also where the whole file has no value there."""
    asked = {"role": "user", "content": "Hi"}
    records = [
        {
            "messages": [asked, calling("weather", city=city, unit=None, deep=[{"x": None}, None])],
            "tools": [tool("weather", unit={"enum": [None, "C"], "default": None}), tool(city)],
            "chat_template_kwargs": {"unit": None},
        }
        for city in ("Paris", "Rome")
    ]
    # Types that differ make the data set's loader keep a column as JSON.
    records[1]["tools"][1]["function"]["parameters"]["properties"] = {"x": [1, "a"]}
    records[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["deep"] = "none"
    records[1]["chat_template_kwargs"] = {"unit": "C"}
    source = JSON_SOURCES[name](records, tmp_path)
    tokenizer = byte_tokenizer(template=WRITES_ALL)
    settings = {"chat_template_kwargs": {"unit": "F"}}
    examples, _ = load_demonstrations(source, tokenizer, **settings, **LIMITS)
    response = tokenizer.decode(examples[0]["response_ids"])
    assert '"arguments": {"city": "Paris", "unit": null, "deep": [{"x": null}, null]}' in response
    prompt = examples[0]["prompt"]
    assert '{"unit": {"enum": [null, "C"], "default": null}}' in prompt
    # The loader of JSON makes a typed column of variables, since all values are texts or null.
    assert ("]null" in prompt) == (name not in ("load_dataset of JSON", "parquet of JSON"))


def test_a_message_of_an_api_may_have_fields_that_are_null(tmp_path: Path):
    """As transformers sees it: they are as good as missing."""
    message = {"role": "assistant", "content": "Ho", "tool_calls": None, "refusal": None}
    counts = "{% if 'tool_calls' in m %}{{ m.tool_calls | length }}{% endif %}"
    template = "{% for m in messages %}" + counts + "{{ m.content }}{{ eos_token }}{% endfor %}"
    source = jsonl(tmp_path, [{"messages": [{"role": "user", "content": "Hi"}, message]}])
    examples, _ = load_demonstrations(source, byte_tokenizer(template=template), **LIMITS)
    assert len(examples) == 1


def test_json_in_parquet_that_is_none_is_named(tmp_path: Path):
    kind = pa.json_()
    rows = pa.array(["{", '{"a": 1}'], pa.string()).cast(pa.string())
    pq.write_table(
        pa.table({"info": pa.ExtensionArray.from_storage(kind, rows)}), tmp_path / "bad.parquet"
    )
    with pytest.raises(DataError, match=r"bad\.parquet: cannot be read"):
        contents(str(tmp_path / "bad.parquet"))
