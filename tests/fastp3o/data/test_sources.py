"""Records of files and hub names: each with the right file and number, or a clear error where it cannot be read."""

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastp3o.data.errors import DataError, RecordError
from fastp3o.data.sources import Record, read_records

RECORDS = [{"prompt": "one"}, {"prompt": "two"}]


def contents(source: object, split: str = "train") -> list[object]:
    return [record.content for record in read_records(str(source), split)]


def json_lines(records: list[object]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    path.write_bytes(json_lines(RECORDS))
    return path


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("records.jsonl", json_lines(RECORDS)),
        ("records.json", json_lines(RECORDS)),
        ("records.json", json.dumps(RECORDS, indent=2).encode()),
        ("records.jsonl.gz", gzip.compress(json_lines(RECORDS), mtime=0)),
        ("records.json.gz", gzip.compress(json.dumps(RECORDS).encode(), mtime=0)),
        ("byte-order mark.jsonl", b"\xef\xbb\xbf" + json_lines(RECORDS)),
        ("byte-order mark.json", b"\xef\xbb\xbf" + json.dumps(RECORDS).encode()),
        ("windows.jsonl", json_lines(RECORDS).replace(b"\n", b"\r\n")),
        ("no last newline.jsonl", json_lines(RECORDS).rstrip()),
    ],
)
def test_json_spellings_hold_the_same_records(tmp_path: Path, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    assert contents(tmp_path / name) == RECORDS


def test_several_sources_come_one_behind_the_other(tmp_path: Path, jsonl: Path):
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "one.jsonl").write_bytes(json_lines([{"prompt": "three"}]))
    (tmp_path / "with,comma.jsonl").write_bytes(json_lines([{"prompt": "four"}]))
    assert contents(f"{jsonl}, {tmp_path / 'more'}") == [*RECORDS, {"prompt": "three"}]
    assert contents(tmp_path / "with,comma.jsonl") == [{"prompt": "four"}]
    (tmp_path / "link.jsonl").symlink_to(jsonl)
    for source, said in (
        (f"{jsonl},", "an empty one"),
        (f"{jsonl},{jsonl}", "comes more than once"),
        (f"{jsonl},{tmp_path}/./{jsonl.name}", "is the same file as"),
        (f"{jsonl},{tmp_path}/link.jsonl", "is the same file as .*, and its records would count twice"),
        (f"{tmp_path}/[lr]*.jsonl", "is the same file as"),
    ):
        with pytest.raises(DataError, match=said):
            contents(source)
    missing = read_records(f"{jsonl},{tmp_path / 'no.jsonl'}", "train")
    with pytest.raises(DataError, match=r"no\.jsonl: no such file or folder"):
        next(missing)  # before the first of the other


def test_parquet(tmp_path: Path):
    records = [{"prompt": f"record {i}", "messages": [{"role": "user", "content": "é"}]} for i in range(2500)]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "records.parquet")
    read = list(read_records(str(tmp_path / "records.parquet"), "train"))
    assert [record.content for record in read] == records
    assert [record.number for record in read] == list(range(1, 2501))


def test_json_lines_are_numbered_by_line_and_their_strings_stay_as_they_are(tmp_path: Path):
    path = tmp_path / "gaps.jsonl"
    path.write_text('{"prompt": "2020-01-01"}\n\n   \n{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8")
    first, last = Record(str(path), 1, {"prompt": "2020-01-01"}), Record(str(path), 4, {"prompt": "a\u2028b\x85c"})
    assert list(read_records(str(path), "train")) == [first, last]
    path.write_bytes(b"\xef\xbb\xbf")
    assert contents(path) == [], "a byte-order mark alone is no record"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"prompt": ', "valid JSON"),
        (b'{"prompt": "\xff"}', "UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', "twice"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", "valid JSON"),
    ],
)
def test_a_line_that_cannot_be_decoded_spoils_only_itself(tmp_path: Path, line: bytes, said: str):
    path = tmp_path / "records.jsonl"
    path.write_bytes(json_lines(RECORDS[:1]) + line + b"\n" + json_lines(RECORDS[1:]))
    first, bad, last = contents(path)
    assert [first, last] == RECORDS
    assert isinstance(bad, RecordError)
    assert said in str(bad.at("records.jsonl", 2))


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("broken.json", b'[{"prompt": "a"},'),
        ("broken.jsonl.gz", gzip.compress(json_lines(RECORDS), mtime=0)[:-9]),
        ("broken.json.gz", b"no gzip"),
        ("broken.parquet", b"PAR1 nothing"),
        ("empty.parquet", b""),
        ("records.csv", b"prompt\na\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=name):
        contents(tmp_path / name)


@pytest.mark.parametrize("source", ["missing.jsonl", "./missing", "/no/such/folder", "~/missing", "a b", "x.csv"])
def test_a_missing_path_is_no_hub_name(source: str):
    with pytest.raises(DataError, match="no such file or folder"):
        contents(source)


# --- folders and globs ----------------------------------------------------------------------------------------------


def test_a_glob_reads_its_files_in_order_and_names_each(tmp_path: Path):
    for name, records in (("b.jsonl", RECORDS[1:]), ("a.jsonl", RECORDS[:1])):
        (tmp_path / name).write_bytes(json_lines(records))
    read = list(read_records(str(tmp_path / "*.jsonl"), "train"))
    assert [(Path(record.file).name, record.number, record.content) for record in read] == [
        ("a.jsonl", 1, RECORDS[0]),
        ("b.jsonl", 1, RECORDS[1]),
    ]
    with pytest.raises(DataError, match="no file matches"):
        contents(tmp_path / "*.parquet")


def test_a_folder_is_read_whole_or_by_its_splits(tmp_path: Path):
    (tmp_path / "README.md").write_text("not data")
    with pytest.raises(DataError, match="no file in this folder"):
        contents(tmp_path)
    (tmp_path / "a.jsonl").write_bytes(json_lines(RECORDS[:1]))
    (tmp_path / "b.json").write_bytes(json.dumps(RECORDS[1:]).encode())
    (tmp_path / "._hidden.jsonl").write_bytes(b"\0")
    assert contents(tmp_path) == RECORDS
    (tmp_path / "a.jsonl").rename(tmp_path / "sft.train.jsonl")
    (tmp_path / "b.json").rename(tmp_path / "sft.eval.json")
    assert contents(tmp_path, "train") == RECORDS[:1]
    assert contents(tmp_path, "test") == RECORDS[1:]  # `datasets` calls eval that
    with pytest.raises(DataError, match=r"'eval'; found sft\.eval\.json, sft\.train\.jsonl"):
        contents(tmp_path, "eval")
    (tmp_path / "more.jsonl").write_bytes(json_lines(RECORDS))
    with pytest.raises(DataError, match=r"more\.jsonl is not"):
        contents(tmp_path, "train")


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl"],
        ["en-train.jsonl", "de-train.jsonl"],
        ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"],
        ["train_sft-00000.jsonl", "train_sft-00001.jsonl"],
        ["001_train_shard.jsonl", "002_train_shard.jsonl"],
    ],
)
def test_every_file_of_a_split_is_read(tmp_path: Path, names: list[str]):
    (tmp_path / "test-00000-of-00001.jsonl").write_bytes(json_lines(RECORDS))
    for name in names:
        (tmp_path / name).write_bytes(json_lines([name]))
    assert contents(tmp_path) == sorted(names)


def test_shards_and_folders_name_splits_too(tmp_path: Path):
    for name in ("data/train_sft-00000-of-00001.jsonl", "data/train_prefs-00000-of-00001.jsonl", "b[1]/test/1.json"):
        (tmp_path / "a" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "a" / name).write_bytes(json_lines([name]))
    for split in ("train_sft", "train_prefs"):
        assert contents(tmp_path / "a", split) == [f"data/{split}-00000-of-00001.jsonl"]
    assert contents(tmp_path / "a" / "b[1]", "test") == ["b[1]/test/1.json"]


# --- the hub --------------------------------------------------------------------------------------------------------


def test_hub_name_with_config_and_split(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(*names: str | None, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(read_records("owner/name", "train[:2]")) == [
        ("owner/name", i, record) for i, record in enumerate(RECORDS, 1)
    ]
    assert contents("owner/name-v1.5:config", "test") == RECORDS
    assert asked == [("owner/name", None, "train[:2]"), ("owner/name-v1.5", "config", "test")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: 1 / 0)
    with pytest.raises(DataError, match="owner/name: the split 'train' cannot be loaded from the hub: division"):
        contents("owner/name")


@pytest.mark.parametrize("source", ["records.jsonl", "*.jsonl", "."])
def test_files_without_splits_have_one(jsonl: Path, monkeypatch: pytest.MonkeyPatch, source: str):
    monkeypatch.chdir(jsonl.parent)
    assert contents(source) == RECORDS
    with pytest.raises(DataError, match=r"no split 'nosuch': .*'train'|the split 'nosuch'; found records"):
        contents(source, "nosuch")
    if source != ".":
        with pytest.raises(DataError, match="slice"):
            contents(source, "train[:1]")


def test_two_columns_of_one_name_are_refused(tmp_path: Path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "two.parquet")
    with pytest.raises(DataError, match=r"two\.parquet: several columns have one name in prompt, prompt"):
        contents(tmp_path / "two.parquet")


@pytest.mark.parametrize("several", [False, True])
def test_a_folder_of_save_to_disk_is_named(tmp_path: Path, several: bool):
    dataset = datasets.Dataset.from_list(RECORDS)
    (datasets.DatasetDict(train=dataset) if several else dataset).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match="saved: save_to_disk wrote this folder, which is not read: use to_json or"):
        contents(tmp_path / "saved")
