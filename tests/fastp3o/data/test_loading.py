"""The three loaders from file to dataset: columns, counts, skipping, limits, and any JSON that may come."""

import datetime
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fastp3o.data import encoding, loading
from fastp3o.data.errors import DataError
from fastp3o.data.loading import (
    DataReport,
    column_values,
    load_demonstrations,
    load_preferences,
    load_prompts,
    load_rankings,
    load_unpaired_preferences,
)
from fastp3o.data.sources import Record
from tests.fastp3o.data.test_encoding import EOS, byte_tokenizer

LENGTHS = {"max_prompt_tokens": 100, "max_response_tokens": 100, "max_characters": 1000}
PAIR = {"prompt": "Hi", "chosen": " you", "rejected": " there"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(
        template="{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )


class Line(str):
    """A line as it is, where any other value is written as JSON."""


def jsonl(folder: Path, records: list[Any], name: str = "records.jsonl") -> str:
    path = folder / name
    path.write_text("".join((record if isinstance(record, Line) else json.dumps(record)) + "\n" for record in records))
    return str(path)


# --- columns --------------------------------------------------------------------------------------------------------


def test_columns(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    source = jsonl(tmp_path, [PAIR, {**PAIR, "prompt": "Zoë 🎈"}])

    def ids(text: str) -> list[int]:
        return tokenizer(text).input_ids

    end = [tokenizer.eos_token_id]
    prompts = [{"prompt": text, "prompt_ids": ids(text)} for text in ("Hi", "Zoë 🎈")]
    data, report = load_prompts(source, tokenizer, max_prompt_tokens=100)
    assert data.to_list() == prompts
    assert report == DataReport(examples=2)

    data, report = load_demonstrations(source, tokenizer, **LENGTHS)
    assert data.to_list() == [example | {"response_ids": ids(" you") + end} for example in prompts]

    data, report = load_preferences(source, tokenizer, **LENGTHS)
    responses = {"chosen_ids": ids(" you") + end, "rejected_ids": ids(" there") + end}
    assert data.to_list() == [example | responses for example in prompts]
    assert data.features["chosen_ids"] == datasets.List(datasets.Value("int32"))

    data, report = load_rankings(source, tokenizer, **LENGTHS)
    ranked = {"ranked_ids": list(responses.values()), "margin": 0.0}
    assert data.to_list() == [example | ranked for example in prompts]

    unpaired = [{"prompt": "Hi", "completion": " you", "label": label} for label in (True, False)]
    data, _ = load_unpaired_preferences(jsonl(tmp_path, unpaired), tokenizer, **LENGTHS)
    responses = {"response_ids": ids(" you") + end}
    assert data.to_list() == [prompts[0] | responses | {"desirable": label} for label in (True, False)]


def test_prompts_as_they_were_given(tmp_path: Path, chat_tokenizer: PreTrainedTokenizerFast):
    asked = [{"role": "user", "content": "Zoë 🎈"}]
    records = [{"prompt": "long " * 50}, {"prompt": asked, "completion": [{"role": "assistant", "content": "you"}]}]
    data, report = load_prompts(jsonl(tmp_path, records), chat_tokenizer, max_prompt_tokens=20, as_given=True)
    assert [json.loads(given) for given in data["given"]] == [{"prompt": "long " * 50}, {"prompt": asked}]
    assert (report.truncated_prompts, len(data[0]["prompt_ids"])) == (1, 20)


@pytest.mark.parametrize("value", [datetime.datetime(2020, 1, 1), float("nan"), "\ud800", ["\ud800"]])
def test_a_prompt_that_no_file_can_hold_as_it_was_given_is_refused_or_skipped(
    tmp_path, chat_tokenizer, monkeypatch, value
):
    asked = {"role": "user", "content": "Hi"}
    records = [Record("f", 1, {"prompt": [asked]}), Record("f", 2, {"prompt": [asked, asked | {"when": value}]})]
    monkeypatch.setattr(loading, "read_records", lambda source, split: iter(records))
    options = {"max_prompt_tokens": 100, "as_given": True}
    with pytest.raises(
        DataError,
        match=r"f record 2 field 'prompt': expected a prompt that JSON has, in UTF-8, got an object with the fields",
    ):
        load_prompts("f", chat_tokenizer, **options)
    data, report = load_prompts("f", chat_tokenizer, **options, skip_bad_records=True)
    assert (len(data), report.skipped) == (1, 1)


def test_rankings_of_any_length_and_preferences_share_a_data_set(tmp_path: Path, chat_tokenizer):
    """A margin of null, as typed files have it, is none."""
    ranked = [{"prompt": "Hi", "ranked_responses": list(letters)} for letters in ("abc", "ba")]
    replies = [[{"role": "assistant", "content": text}] for text in "dcba"]
    ranked.append({"prompt": [{"role": "user", "content": "Hi"}], "ranked_responses": replies})
    sources = [jsonl(tmp_path, ranked, "ranked.jsonl")]
    sources.append(jsonl(tmp_path, [PAIR | {"margin": margin} for margin in (0.5, None, 0, 10**30)], "pairs.jsonl"))
    data, report = load_rankings(",".join(sources), chat_tokenizer, **LENGTHS)
    texts = [[chat_tokenizer.decode(ids[:-1]) for ids in example["ranked_ids"]] for example in data]
    assert texts == [list("abc"), list("ba"), ["d;", "c;", "b;", "a;"], *[[" you", " there"]] * 4]
    assert data["prompt"][:4] == ["Hi", "Hi", "u:Hi;a:", "Hi"]
    assert data["margin"][:] == [0, 0, 0, 0.5, 0, 0, 1e30]
    assert "7 examples, 0 prompts and 0 responses truncated, 0 records" in str(report)


VALUES = ["7", 7, 7.0, 0.1 + 0.2, 2**70, "", False, [], [1, "a", None], {"a": {"b": None}}, "\ud800", "2020-01-01"]


def test_further_columns_are_what_the_records_have(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    source = jsonl(tmp_path, [{"prompt": "Hi", "answer": value, "id": 1, "other": 0} for value in VALUES])
    data, _ = load_prompts(source, tokenizer, max_prompt_tokens=100, columns={"answer": "f", "id": "f"})
    assert data.column_names == ["prompt", "prompt_ids", "answer", "id"]
    read = column_values(data[:])
    assert read == {"answer": VALUES, "id": [1] * len(VALUES)}
    assert list(map(type, read["answer"])) == list(map(type, VALUES))
    plain, _ = load_prompts(source, tokenizer, max_prompt_tokens=100)
    assert data._fingerprint != plain._fingerprint


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"id": 1}, "expected a value, which f asks for, got nothing: the record has the fields prompt, id"),
        ({"answer": None}, "expected a value, which f asks for, got null"),
        ({"answer": float("nan")}, "expected a value that JSON has, which f asks for, got the number nan"),
    ],
)
def test_a_record_without_an_asked_column_is_refused_or_skipped(tmp_path, tokenizer, record, said):
    source = jsonl(tmp_path, [{"prompt": "Hi", "answer": "a"}, {"prompt": "Hi"} | record])
    options = {"max_prompt_tokens": 100, "columns": {"answer": "f"}}
    with pytest.raises(DataError) as error:
        load_prompts(source, tokenizer, **options)
    assert str(error.value) == f"{source} record 2 field 'answer': {said}"
    assert load_prompts(source, tokenizer, **options, skip_bad_records=True)[1].skipped == 1


def test_a_column_that_json_lacks_or_that_is_the_prompt_is_refused(tmp_path, tokenizer):
    pq.write_table(pa.table({"prompt": ["Hi"], "day": [datetime.date(2020, 1, 1)]}), tmp_path / "days.parquet")
    with pytest.raises(DataError, match=r"record 1 field 'day': expected a value that JSON has, .* got a date"):
        load_prompts(str(tmp_path / "days.parquet"), tokenizer, max_prompt_tokens=100, columns={"day": "f"})
    with pytest.raises(ValueError, match="f asks for the column 'prompt', which is the prompt itself"):
        load_prompts(str(tmp_path / "days.parquet"), tokenizer, max_prompt_tokens=100, columns={"prompt": "f"})


def test_data_stay_in_order_are_memory_mapped_and_leave_no_file(tmp_path: Path, tokenizer, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    before = pa.total_allocated_bytes()
    records = [{"prompt": f"{number:090}"} for number in range(10_000)]  # more than a batch
    data, _ = load_prompts(jsonl(tmp_path, records), tokenizer, max_prompt_tokens=100)
    assert data.data.nbytes > 10_000 * 90
    assert pa.total_allocated_bytes() - before < 10_000
    # Not even while the data are in use, so that nothing can end the process too early.
    assert not list((tmp_path / "scratch").iterdir())
    assert data["prompt"][:] == [record["prompt"] for record in records]


def test_the_fingerprint_is_that_of_the_examples(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    def fingerprint(records: list[dict[str, str]], folder: str, **options: Any) -> str:
        (tmp_path / folder).mkdir(exist_ok=True)
        source = jsonl(tmp_path / folder, records)
        return load_demonstrations(source, tokenizer, **{**LENGTHS, **options})[0]._fingerprint

    same = fingerprint([PAIR] * 3, "one")
    assert same == fingerprint([PAIR] * 3, "two")
    assert same == fingerprint([PAIR] * 5, "two", limit=3)
    assert same != fingerprint([PAIR] * 2, "two")
    assert same != fingerprint([PAIR, PAIR, PAIR | {"prompt": "Hj"}], "two")
    assert same != fingerprint([PAIR, PAIR, PAIR | {"chosen": " yov"}], "two")
    assert same != fingerprint([PAIR] * 3, "two", max_response_tokens=3)


def test_messages_need_a_chat_template_whatever_is_skipped(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    source = jsonl(tmp_path, [{"prompt": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(DataError, match=r"records\.jsonl record 1: .*no chat template"):
        load_prompts(source, tokenizer, max_prompt_tokens=100, skip_bad_records=True)


# --- bad records ----------------------------------------------------------------------------------------------------

BAD_RECORDS = [
    ({**PAIR, "chosen": None}, "record 2 field 'chosen': expected text, got null"),
    ({"prompt": "Hi", "chosen": "a"}, "record 2 field 'rejected': expected text, got nothing: the field is missing"),
    ({**PAIR, "prompt": " "}, "record 2 field 'prompt': expected text, got only white space"),
    ({**PAIR, "rejected": " you"}, "record 2 field 'rejected': expected another response than 'chosen', got the same"),
    ({**PAIR, "chosen": "o" * 2000}, "record 2 field 'chosen': expected at most 1000 characters, got 2000 of them"),
    (Line("{"), "record 2: expected valid JSON, got text that is not"),
    ([PAIR], "record 2: expected an object, got a list of 1"),
]


def test_bad_records_stop_the_run_or_are_skipped_and_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    for bad, said in BAD_RECORDS:
        source = jsonl(tmp_path, [PAIR, bad])
        with pytest.raises(DataError) as caught:
            load_preferences(source, tokenizer, **LENGTHS)
        assert str(caught.value).startswith(f"{source} {said}")
    # The first record that has a layout decides: the record without `rejected` is bad for one reason before and after.
    bad = [record for record, _ in BAD_RECORDS]
    source = jsonl(tmp_path, [*bad, PAIR, *bad, {**PAIR, "prompt": "Ho"}, {**PAIR, "prompt": 7.5}])
    data, report = load_preferences(source, tokenizer, skip_bad_records=True, **LENGTHS)
    assert data["prompt"][:] == ["Hi", "Ho"]
    assert (report.examples, report.skipped) == (2, 2 * len(bad) + 1)
    assert sum(report.reasons.values()) == report.skipped
    assert report.reasons["field 'prompt': expected text"] == 3
    assert str(report).startswith("2 examples, 0 prompts and 0 responses truncated, 15 records skipped (")
    with pytest.raises(
        DataError, match=r"got none \(0 examples, .* 3 records skipped \(3 × field 'prompt': expected text\)\)"
    ):
        load_prompts(jsonl(tmp_path, [{"prompt": 1}] * 3), tokenizer, max_prompt_tokens=100, skip_bad_records=True)


def test_files_may_differ_in_layout_but_records_of_one_file_not(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    labelled, completed = {"prompt": "Hi", "label": "a"}, {"prompt": "Hi", "completion": "a"}
    jsonl(tmp_path, [labelled], "a.jsonl")
    jsonl(tmp_path, [completed], "b.jsonl")
    assert load_demonstrations(str(tmp_path / "*.jsonl"), tokenizer, **LENGTHS)[1].examples == 2
    jsonl(tmp_path, [labelled, completed], "mixed.jsonl")
    with pytest.raises(DataError, match=r"mixed\.jsonl record 2 field 'label'"):
        load_demonstrations(str(tmp_path / "*.jsonl"), tokenizer, **LENGTHS)


# --- lengths and limits ---------------------------------------------------------------------------------------------


def test_truncations_and_texts_of_special_tokens_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerFast):
    records = [PAIR, {"prompt": "0123456789", "chosen": "abcdef", "rejected": "uvwxyz"}, {**PAIR, "chosen": "abcdefgh"}]
    source = jsonl(tmp_path, records)
    data, report = load_preferences(source, tokenizer, max_prompt_tokens=4, max_response_tokens=7)
    assert data[1]["prompt"] == "6789"
    assert tokenizer.decode(data[2]["chosen_ids"]) == "abcdefg"
    assert (report.truncated_prompts, report.truncated_responses) == (1, 1)
    _, report = load_preferences(source, tokenizer, max_prompt_tokens=4, max_response_tokens=6)
    assert (report.truncated_prompts, report.truncated_responses) == (1, 5)
    same = {"prompt": "Hi", "chosen": "same start", "rejected": "same end"}  # once truncated
    with pytest.raises(DataError, match="field 'rejected': expected another response than 'chosen'"):
        load_preferences(jsonl(tmp_path, [same]), tokenizer, max_prompt_tokens=9, max_response_tokens=4)
    special = jsonl(tmp_path, [PAIR, {**PAIR, "chosen": f" you{EOS}"}])
    said = str(load_preferences(special, tokenizer, **LENGTHS)[1])
    assert "truncated, 1 texts with the name of a special token, which is text, 0 records" in said


@pytest.mark.parametrize("limit", [1, 5])
def test_limit_takes_usable_records_and_reads_no_further(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, limit: int
):
    good = [{"prompt": f"record {i}"} for i in range(limit)]
    source = jsonl(tmp_path, [{"prompt": None}, *good, {"prompt": None}])
    with pytest.raises(DataError, match="record 1 field 'prompt'"):
        load_prompts(source, tokenizer, max_prompt_tokens=9, limit=limit)
    data, report = load_prompts(source, tokenizer, max_prompt_tokens=9, limit=limit, skip_bad_records=True)
    assert data["prompt"][:] == [record["prompt"] for record in good]
    assert (report.examples, report.skipped) == (limit, 1)
    assert load_prompts(source, tokenizer, max_prompt_tokens=9, limit=99, skip_bad_records=True)[1].skipped == 2


# --- any JSON -------------------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
NESTED = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
AWKWARD = st.sampled_from(["", " ", "\ud800", EOS, f"a{EOS}b", "\n\nAssistant:"]) | NESTED


def mostly(usual: st.SearchStrategy, unusual: st.SearchStrategy = AWKWARD) -> st.SearchStrategy:
    return st.integers(0, 9).flatmap(lambda roll: unusual if roll == 0 else usual)


TEXT = mostly(st.text(min_size=1, max_size=9))
DIALOGUE = mostly(TEXT.map(lambda reply: f"\n\nHuman: Hi\n\nAssistant: {reply}"))
USER, ASSISTANT = (
    st.fixed_dictionaries({"role": mostly(st.just(role)), "content": TEXT}) for role in ("user", "assistant")
)
CONVERSATION = mostly(st.tuples(st.just({"role": "user", "content": "Hi"}), ASSISTANT).map(list))
PROMPT, REPLY = mostly(USER.map(lambda message: [message])), mostly(ASSISTANT.map(lambda message: [message]))
SUMMARY = mostly(st.fixed_dictionaries({"text": TEXT}))
COMPARISON = {
    "info": mostly(st.fixed_dictionaries({"post": TEXT}, optional={"title": TEXT, "subreddit": TEXT})),
    "summaries": mostly(st.lists(SUMMARY, min_size=2, max_size=2)),
    "choice": mostly(st.integers(0, 1)),
}
LAYOUTS = [
    {"prompt": TEXT},
    *({"prompt": TEXT, column: TEXT} for column in ("label", "completion", "response")),
    {"prompt": TEXT, "completion": TEXT, "label": st.booleans()},
    {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT},
    {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT, "margin": mostly(st.floats(0, 9))},
    {"prompt": TEXT, "ranked_responses": mostly(st.lists(TEXT, max_size=4))},
    {"prompt": PROMPT, "ranked_responses": mostly(st.lists(REPLY, max_size=4))},
    {"prompt": PROMPT, "completion": REPLY},
    {"prompt": PROMPT, "chosen": REPLY, "rejected": REPLY},
    {"messages": CONVERSATION},
    {"chosen": DIALOGUE, "rejected": DIALOGUE},
    {"chosen": CONVERSATION, "rejected": CONVERSATION},
    COMPARISON,
]
ANY_COLUMNS = st.dictionaries(st.sampled_from(sorted({column for layout in LAYOUTS for column in layout})), AWKWARD)
FILES = st.sampled_from(LAYOUTS).flatmap(
    lambda layout: st.lists(mostly(st.fixed_dictionaries(layout), ANY_COLUMNS | NESTED), max_size=5)
)


@pytest.mark.parametrize(
    "load", [load_prompts, load_demonstrations, load_preferences, load_rankings, load_unpaired_preferences]
)
@settings(max_examples=150, deadline=None)
@given(records=FILES, skip=st.booleans())
def test_any_json_gives_usable_records_or_a_data_error(
    tmp_path_factory: pytest.TempPathFactory,
    chat_tokenizer: PreTrainedTokenizerFast,
    load: Any,
    records: list[Any],
    skip: bool,
):
    lengths = LENGTHS if load is not load_prompts else {"max_prompt_tokens": 100}
    source = jsonl(tmp_path_factory.mktemp("fuzz"), records)
    try:
        data, report = load(source, chat_tokenizer, skip_bad_records=skip, **lengths)
    except DataError:
        return
    event("usable")
    assert len(data) == report.examples > 0
    assert report.examples + report.skipped == len(records), "every record is used or counted"
    assert report.reasons == Counter() or skip
    for example in data:
        example.pop("margin", None)
        assert isinstance(example.pop("desirable", True), bool)
        assert all(example.values())
        assert example.get("chosen_ids", [0]) != example.get("rejected_ids", [1])


def test_a_template_that_hangs_stops_the_run_whatever_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encoding, "TIME_LIMIT", 0.2)
    loops = ["{% for a in range(99999) %}"] * 4 + ["{% endfor %}"] * 4
    source = jsonl(tmp_path, [{"messages": [{"role": "user", "content": "Hi"}]}])
    with pytest.raises(DataError, match=r"the chat template has not ended after 0.2 s, for field 'messages'"):
        load_prompts(source, byte_tokenizer(template="".join(loops)), max_prompt_tokens=9, skip_bad_records=True)
