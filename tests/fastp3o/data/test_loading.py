"""The three loaders from file to dataset: columns, counts, skipping, limits, and any JSON that may
come.
"""

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fastp3o.data import encoding, loading
from fastp3o.data.errors import DataError
from fastp3o.data.sources import Record
from tests.fastp3o.data.test_encoding import EOS, byte_tokenizer

LENGTHS = {"max_prompt_tokens": 100, "max_response_tokens": 100, "max_characters": 1000}
PAIR = {"prompt": "Hi", "chosen": " you", "rejected": " there"}

PLAIN = byte_tokenizer()
CHAT = byte_tokenizer(
    template="{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


class Line(str):
    """A line as it is, where any other value is written as JSON."""


def jsonl(folder: Path, records: list[Any], name: str = "records.jsonl") -> str:
    path = folder / name
    path.write_text(
        "".join(
            (record if isinstance(record, Line) else json.dumps(record)) + "\n"
            for record in records
        )
    )
    return str(path)


def prompts(
    folder: Path, records: list[Any], tokenizer: PreTrainedTokenizerFast = PLAIN, **options: Any
):
    return loading.load_prompts(
        jsonl(folder, records), tokenizer, **{"max_prompt_tokens": 100} | options
    )


def preferences(folder: Path, records: list[Any], **options: Any):
    return loading.load_preferences(jsonl(folder, records), PLAIN, **LENGTHS | options)


def ids(text: str) -> list[int]:
    return PLAIN(text).input_ids


def test_columns(tmp_path: Path):
    source, end = jsonl(tmp_path, [PAIR, {**PAIR, "prompt": "Zoë 🎈"}]), [PLAIN.eos_token_id]
    prompts = [{"prompt": text, "prompt_ids": ids(text)} for text in ("Hi", "Zoë 🎈")]
    chosen, rejected = ids(" you") + end, ids(" there") + end
    data, report = loading.load_prompts(source, PLAIN, max_prompt_tokens=100)
    assert data.to_list() == prompts
    assert report == loading.DataReport(examples=2)
    for load, columns in {
        loading.load_demonstrations: {"response_ids": chosen},
        loading.load_preferences: {"chosen_ids": chosen, "rejected_ids": rejected},
        loading.load_rankings: {
            "ranked_ids": [chosen, rejected],
            "margin": 0.0,
            "probability": 1.0,
        },
    }.items():
        data, _ = load(source, PLAIN, **LENGTHS)
        assert data.to_list() == [example | columns for example in prompts]
    unpaired = [{"prompt": "Hi", "completion": " you", "label": label} for label in (True, False)]
    data, _ = loading.load_unpaired_preferences(jsonl(tmp_path, unpaired), PLAIN, **LENGTHS)
    assert data.to_list() == [
        prompts[0] | {"response_ids": chosen, "desirable": label} for label in (True, False)
    ]
    assert data.features["response_ids"] == datasets.List(datasets.Value("int32"))


def test_rankings_of_any_length_and_preferences_share_a_data_set(tmp_path: Path):
    """A margin of null, as typed files have it, is none."""
    ranked = [{"prompt": "Hi", "ranked_responses": list(letters)} for letters in ("abc", "ba")]
    replies = [[{"role": "assistant", "content": text}] for text in "dcba"]
    ranked.append({"prompt": [{"role": "user", "content": "Hi"}], "ranked_responses": replies})
    sources = [jsonl(tmp_path, ranked, "ranked.jsonl")]
    sources.append(
        jsonl(
            tmp_path,
            [PAIR | {"margin": margin} for margin in (0.5, None, 0, 10**30)],
            "pairs.jsonl",
        )
    )
    data, _ = loading.load_rankings(",".join(sources), CHAT, **LENGTHS)
    texts = [[CHAT.decode(ids[:-1]) for ids in example["ranked_ids"]] for example in data]
    assert texts == [list("abc"), list("ba"), ["d;", "c;", "b;", "a;"], *[[" you", " there"]] * 4]
    assert data["prompt"][:4] == ["Hi", "Hi", "u:Hi;a:", "Hi"]
    assert data["margin"][:] == [0, 0, 0, 0.5, 0, 0, 1e30]


VALUES = [
    "7",
    7,
    7.0,
    0.1 + 0.2,
    2**70,
    "",
    False,
    [],
    [1, "a", None],
    {"a": {"b": None}},
    "\ud800",
    "2020-01-01",
]


def test_further_columns_are_what_the_records_have(tmp_path: Path):
    records = [{"prompt": "Hi", "answer": value, "id": 1, "other": 0} for value in VALUES]
    data, _ = prompts(tmp_path, records, columns={"answer": "f", "id": "f"})
    assert data.column_names == ["prompt", "prompt_ids", "answer", "id"]
    read = loading.column_values(data[:])
    assert read == {"answer": VALUES, "id": [1] * len(VALUES)}
    assert list(map(type, read["answer"])) == list(map(type, VALUES))
    assert data._fingerprint != prompts(tmp_path, records)[0]._fingerprint
    with pytest.raises(
        ValueError, match="f asks for the column 'prompt', which is the prompt itself"
    ):
        prompts(tmp_path, records, columns={"prompt": "f"})


ASKED, GIVEN = {"columns": {"answer": "f"}}, {"as_given": True}
NO_JSON, NO_PROMPT = (
    "'answer': expected a value that JSON has, which f",
    "'prompt': expected a prompt that JSON",
)
DAY = datetime.date(2020, 1, 1)
HI = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("options", "record", "said"),
    [
        (
            ASKED,
            {"id": 1},
            "'answer': expected a value, which f asks for, got nothing: the record has the fields",
        ),
        (ASKED, {"answer": None}, "'answer': expected a value, which f asks for, got null"),
        (ASKED, {"answer": float("nan")}, NO_JSON),
        (GIVEN, {"prompt": [HI, HI | {"when": DAY}]}, NO_PROMPT),
        (GIVEN, {"prompt": [HI, HI | {"when": ["\ud800"]}]}, NO_PROMPT),
    ],
)
def test_what_no_file_can_hold_or_is_not_there_is_refused_or_skipped(
    monkeypatch, options, record, said
):
    records = [
        Record("f", 1, {"prompt": "Hi", "answer": "a"}),
        Record("f", 2, {"prompt": "Hi"} | record),
    ]
    monkeypatch.setattr(loading, "read_records", lambda source, split: iter(records))
    with pytest.raises(DataError, match=f"f record 2 field {said}"):
        loading.load_prompts("f", CHAT, max_prompt_tokens=100, **options)
    data, report = loading.load_prompts(
        "f", CHAT, max_prompt_tokens=100, **options, skip_bad_records=True
    )
    assert (len(data), report.skipped) == (1, 1)


def test_data_stay_in_order_are_memory_mapped_and_leave_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    before = pa.total_allocated_bytes()
    records = [{"prompt": f"{number:090}"} for number in range(10_000)]  # more than a batch
    data, _ = prompts(tmp_path, records)
    assert data.data.nbytes > 10_000 * 90
    assert pa.total_allocated_bytes() - before < 10_000
    # Not even while the data are in use, so that nothing can end the process too early.
    assert not list((tmp_path / "scratch").iterdir())
    assert data["prompt"][:] == [record["prompt"] for record in records]


def test_the_fingerprint_is_that_of_the_examples(tmp_path: Path):
    def fingerprint(
        records: list[dict[str, str]], name: str = "records.jsonl", **options: Any
    ) -> str:
        return loading.load_demonstrations(
            jsonl(tmp_path, records, name), PLAIN, **LENGTHS | options
        )[0]._fingerprint

    same = fingerprint([PAIR] * 3)
    assert same == fingerprint([PAIR] * 5, "others.jsonl", limit=3)
    assert same != fingerprint([PAIR] * 2)
    assert same != fingerprint([PAIR, PAIR, PAIR | {"chosen": " yov"}])
    assert same != fingerprint([PAIR] * 3, max_response_tokens=3)


BAD_RECORDS = [
    (
        {"prompt": "Hi", "chosen": "a"},
        "record 2 field 'rejected': expected text, got nothing: the field is missing",
    ),
    (
        {**PAIR, "rejected": " you"},
        "record 2 field 'rejected': expected another response than 'chosen', got the same",
    ),
    (
        {**PAIR, "chosen": "o" * 2000},
        "record 2 field 'chosen': expected at most 1000 characters, got 2000 of them",
    ),
    (Line("{"), "record 2: expected valid JSON in UTF-8, got text that is not"),
    ([PAIR], "record 2: expected an object, got a list of 1"),
]


def test_bad_records_stop_the_run_or_are_skipped_and_counted(tmp_path: Path):
    for bad, said in BAD_RECORDS:
        with pytest.raises(DataError, match=f"records.jsonl {said}"):
            preferences(tmp_path, [PAIR, bad])
    # The first record that has a layout decides: the record without `rejected` is bad for one
    # reason before and after.
    bad = [record for record, _ in BAD_RECORDS]
    records = [*bad, PAIR, *bad, {**PAIR, "prompt": "Ho"}, {**PAIR, "prompt": 7.5}]
    data, report = preferences(tmp_path, records, skip_bad_records=True)
    assert data["prompt"][:] == ["Hi", "Ho"]
    assert (report.examples, report.skipped) == (2, 2 * len(bad) + 1)
    assert sum(report.reasons.values()) == report.skipped
    assert report.reasons["field 'rejected': expected another response than 'chosen'"] == 2
    assert str(report).startswith(
        "2 examples, 0 prompts and 0 responses truncated, 11 records skipped ("
    )
    none = r"got none \(0 examples, .* 3 records skipped \(3 × field 'prompt': expected text\)\)"
    with pytest.raises(DataError, match=none):
        prompts(tmp_path, [{"prompt": 1}] * 3, skip_bad_records=True)


def test_what_no_record_can_mend_stops_the_run_whatever_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(encoding, "TIME_LIMIT", 0.2)
    hangs = byte_tokenizer(template="{% for a in range(99999) %}" * 4 + "{% endfor %}" * 4)
    for tokenizer, said in (
        (PLAIN, r"records\.jsonl record 1: .*no chat template"),
        (hangs, "the chat template has not ended after 0.2 s, for field 'messages'"),
    ):
        with pytest.raises(DataError, match=said):
            prompts(tmp_path, [{"messages": [HI]}], tokenizer, skip_bad_records=True)


def test_files_may_differ_in_layout_but_records_of_one_file_not(tmp_path: Path):
    labeled, completed = {"prompt": "Hi", "label": "a"}, {"prompt": "Hi", "completion": "a"}
    jsonl(tmp_path, [labeled], "a.jsonl")
    jsonl(tmp_path, [completed], "b.jsonl")
    assert loading.load_demonstrations(str(tmp_path / "*.jsonl"), PLAIN, **LENGTHS)[1].examples == 2
    jsonl(tmp_path, [labeled, completed], "mixed.jsonl")
    with pytest.raises(DataError, match=r"mixed\.jsonl record 2 field 'label'"):
        loading.load_demonstrations(str(tmp_path / "*.jsonl"), PLAIN, **LENGTHS)


def test_truncations_and_texts_of_special_tokens_are_counted(tmp_path: Path):
    records = [
        PAIR,
        {"prompt": "0123456789", "chosen": "abcdef", "rejected": "uvwxyz"},
        {**PAIR, "chosen": "abcdefgh"},
    ]
    data, report = preferences(tmp_path, records, max_prompt_tokens=4, max_response_tokens=6)
    assert data[1]["prompt"] == "6789"
    assert PLAIN.decode(data[2]["chosen_ids"]) == "abcdef"
    assert (report.truncated_prompts, report.truncated_responses) == (1, 5)
    same = {"prompt": "Hi", "chosen": "same start", "rejected": "same end"}  # once truncated
    with pytest.raises(
        DataError, match="field 'rejected': expected another response than 'chosen'"
    ):
        preferences(tmp_path, [same], max_response_tokens=4)
    said = str(preferences(tmp_path, [PAIR, {**PAIR, "chosen": f" you{EOS}"}])[1])
    assert "truncated, 1 texts with the name of a special token, which is text, 0 records" in said


def test_limit_takes_usable_records_and_reads_no_further(tmp_path: Path):
    records = [{"prompt": prompt} for prompt in (None, "one", "two", None)]
    data, report = prompts(tmp_path, records, limit=2, skip_bad_records=True)
    assert data["prompt"][:] == ["one", "two"]
    assert (report.examples, report.skipped) == (2, 1)
    assert prompts(tmp_path, records[1:], limit=2)[1].examples == 2
    assert prompts(tmp_path, records, limit=99, skip_bad_records=True)[1].skipped == 2


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
NAMES = st.text(max_size=5) | st.sampled_from(["prompt", "label", "chosen", "margin", "role"])
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
AWKWARD = st.sampled_from(["", " ", "\ud800", EOS, f"a{EOS}b", "\n\nAssistant:"]) | NESTED


@st.composite
def mostly(draw: st.DrawFn, value: Any) -> Any:
    """The value, in which now and then something else is in the place of a part."""
    if draw(st.integers(0, 12)) == 0:
        return draw(AWKWARD)
    if isinstance(value, dict):
        return {name: draw(mostly(item)) for name, item in value.items()}
    return [draw(mostly(item)) for item in value] if isinstance(value, list) else value


REPLIES = [[{"role": "assistant", "content": text}] for text in ("Ho", "No")]
DIALOGUES = [f"\n\nHuman: Hi\n\nAssistant: {text}" for text in ("Ho", "No")]
RECORDS = [
    PAIR | {"margin": 1.5},
    {"prompt": [HI], "ranked_responses": REPLIES},
    {"prompt": [HI], "completion": REPLIES[0], "label": False},
    {"messages": [HI, *REPLIES[0]]},
    {"chosen": DIALOGUES[0], "rejected": DIALOGUES[1]},
    {"chosen": [HI, *REPLIES[0]], "rejected": [HI, *REPLIES[1]]},
    {
        "info": {"post": "I ran.", "title": "A run"},
        "summaries": [{"text": "a"}, {"text": "b"}],
        "choice": 1,
    },
]
FILES = st.sampled_from(RECORDS).flatmap(lambda record: st.lists(mostly(record), max_size=5))


@pytest.mark.parametrize(
    "load",
    [
        loading.load_prompts,
        loading.load_demonstrations,
        loading.load_preferences,
        loading.load_rankings,
        loading.load_unpaired_preferences,
    ],
)
@settings(max_examples=150, deadline=None)
@given(records=FILES, skip=st.booleans())
def test_any_json_gives_usable_records_or_a_data_error(
    tmp_path_factory, load: Any, records: list[Any], skip: bool
):
    lengths = LENGTHS if load is not loading.load_prompts else {"max_prompt_tokens": 100}
    source = jsonl(tmp_path_factory.mktemp("fuzz"), records)
    try:
        data, report = load(source, CHAT, skip_bad_records=skip, **lengths)
    except DataError:
        return
    assert len(data) == report.examples > 0
    assert report.examples + report.skipped == len(records), "every record is used or counted"
    assert report.reasons == Counter() or skip
    for example in data:
        example.pop("margin", None)
        assert isinstance(example.pop("desirable", True), bool)
        assert all(example.values())
        assert example.get("chosen_ids", [0]) != example.get("rejected_ids", [1])
