"""Records of files and hub names: each with the right file and number, or a clear error where it
cannot be read.
"""

import gzip
import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fastp3o.data.errors import DataError
from fastp3o.data.sources import Record, read_records

RECORDS = [{"prompt": "one"}, {"prompt": "two"}]
MARK = b"\xef\xbb\xbf"


def contents(source: object, split: str = "train") -> list[object]:
    return [record.content for record in read_records(str(source), split)]


def json_lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


LINES = json_lines(*RECORDS)


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("lines.json", LINES),
        ("array.json", json.dumps(RECORDS, indent=2).encode()),
        ("lines.jsonl.gz", gzip.compress(LINES, mtime=0)),
        ("byte-order mark.jsonl", MARK + LINES),
        ("byte-order mark.json", MARK + json.dumps(RECORDS).encode()),
        ("windows, no last newline.jsonl", LINES.replace(b"\n", b"\r\n").rstrip()),
    ],
)
def test_json_spellings_hold_the_same_records(tmp_path: Path, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    assert contents(tmp_path / name) == RECORDS


def test_parquet(tmp_path: Path):
    records = [
        {"prompt": f"record {i}", "messages": [{"role": "user", "content": "é"}]}
        for i in range(2500)
    ]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "records.parquet")
    path = str(tmp_path / "records.parquet")
    assert list(read_records(path, "train")) == [
        (path, number, record) for number, record in enumerate(records, 1)
    ]
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, tmp_path / "two.parquet")
    with pytest.raises(
        DataError, match=r"two\.parquet: several columns have one name in prompt, prompt"
    ):
        contents(tmp_path / "two.parquet")


def test_json_lines_are_numbered_by_line_and_their_strings_stay_as_they_are(tmp_path: Path):
    path = tmp_path / "gaps.jsonl"
    path.write_text(
        '{"prompt": "2020-01-01"}\n\n   \n{"prompt": "a\u2028b\x85c"}\n', encoding="utf-8"
    )
    first, last = (
        Record(str(path), 1, {"prompt": "2020-01-01"}),
        Record(str(path), 4, {"prompt": "a\u2028b\x85c"}),
    )
    assert list(read_records(str(path), "train")) == [first, last]
    path.write_bytes(MARK)
    assert contents(path) == [], "a byte-order mark alone is no record"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("broken.json", b'[{"prompt": "a"},'),
        ("broken.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9]),
        ("broken.json.gz", b"no gzip"),
        ("broken.parquet", b"PAR1 nothing"),
        ("records.csv", b"prompt\na\n"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, data: bytes):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=name):
        contents(tmp_path / name)


def test_several_sources_come_one_behind_the_other_and_no_file_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    one, two = map(json_lines, RECORDS)
    write(tmp_path, {"b.jsonl": two, "a.jsonl": one, "more/x.jsonl": two, "with,comma.jsonl": one})
    read = list(read_records("*.jsonl, more", "train"))
    assert [record.file for record in read] == [
        "a.jsonl",
        "b.jsonl",
        "with,comma.jsonl",
        "more/x.jsonl",
    ]
    assert [record.number for record in read] == [1] * 4
    assert [record.content for record in read] == [*RECORDS, *RECORDS]
    assert contents("with,comma.jsonl") == RECORDS[:1]
    (tmp_path / "link.jsonl").symlink_to("a.jsonl")
    for source, said in (
        ("a.jsonl,", "an empty one"),
        ("a.jsonl,a.jsonl", "comes more than once"),
        ("a.jsonl,./a.jsonl", "is the same file as"),
        ("[al]*.jsonl", "is the same file as .*, and its records would count twice"),
        ("*.parquet", "no file matches"),
        ("a.jsonl,no.jsonl", r"no\.jsonl: no such file or folder"),
    ):
        with pytest.raises(DataError, match=said):
            next(read_records(source, "train"))  # before the first of the other


def test_a_folder_is_read_whole_or_by_its_splits(tmp_path: Path):
    write(tmp_path, {"README.md": b"not data"})
    with pytest.raises(DataError, match="no file in this folder"):
        contents(tmp_path)
    one, two = map(json_lines, RECORDS)
    write(tmp_path, {"a.jsonl": one, "b.json": two, "._hidden.jsonl": b"\0"})
    assert contents(tmp_path) == RECORDS
    (tmp_path / "a.jsonl").rename(tmp_path / "sft.train.jsonl")
    (tmp_path / "b.json").rename(tmp_path / "sft.eval.json")
    assert contents(tmp_path, "train") == RECORDS[:1]
    assert contents(tmp_path, "test") == RECORDS[1:]  # `datasets` calls eval that
    with pytest.raises(DataError, match=r"'eval'; found sft\.eval\.json, sft\.train\.jsonl"):
        contents(tmp_path, "eval")
    write(tmp_path, {"more.jsonl": one})
    with pytest.raises(DataError, match=r"more\.jsonl is not"):
        contents(tmp_path, "train")


@pytest.mark.parametrize(
    ("split", "names", "other"),
    [
        (
            "train_sft",
            ["data/train_sft-00000-of-00001.jsonl"],
            "data/train_prefs-00000-of-00001.jsonl",
        ),
        ("train", ["b[1]/train/1.json"], "b[1]/test/1.json"),
    ],
)
def test_every_file_of_a_split_is_read(tmp_path: Path, split: str, names: list[str], other: str):
    write(tmp_path, {name: json_lines(name) for name in [*names, other]})
    assert contents(tmp_path, split) == names


def test_files_without_splits_have_one_and_no_slices_and_a_folder_of_save_to_disk_is_named(
    tmp_path: Path,
):
    write(tmp_path, {"records.jsonl": LINES})
    for source in ("records.jsonl", "*.jsonl", "."):
        with pytest.raises(
            DataError, match=r"no split 'nosuch': .*'train'|the split 'nosuch'; found records"
        ):
            contents(tmp_path / source, "nosuch")
    with pytest.raises(DataError, match="slice"):
        contents(tmp_path / "records.jsonl", "train[:1]")
    dataset = datasets.Dataset.from_list(RECORDS)
    for number, saved in enumerate((dataset, datasets.DatasetDict(train=dataset))):
        saved.save_to_disk(tmp_path / f"saved{number}")
        with pytest.raises(
            DataError, match=f"saved{number}: save_to_disk wrote this folder, which is not read"
        ):
            contents(tmp_path / f"saved{number}")
    for missing in ("missing.jsonl", "./missing", "/no/such/folder", "~/missing", "a b", "x.csv"):
        with pytest.raises(DataError, match="no such file or folder"):  # and no hub name
            contents(missing)


def test_hub_name_with_config_and_split(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def load_dataset(*names: str | None, split: str) -> datasets.Dataset:
        asked.append((*names, split))
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    numbered = [("owner/name", 1, RECORDS[0]), ("owner/name", 2, RECORDS[1])]
    assert list(read_records("owner/name", "train[:2]")) == numbered
    assert contents("owner/name-v1.5:config", "test") == RECORDS
    assert asked == [("owner/name", None, "train[:2]"), ("owner/name-v1.5", "config", "test")]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split: 1 / 0)
    with pytest.raises(
        DataError, match="owner/name: the split 'train' cannot be loaded from the hub: division"
    ):
        contents("owner/name")
