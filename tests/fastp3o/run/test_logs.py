import gzip
import itertools
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest

from fastp3o.run import log
from fastp3o.run.log import LoggedGroup, LoggedResponse
from tests.fastp3o.run.faults.injection import KILLED, FileCalls, in_child


def append(path: Path, *numbers: int) -> None:
    for step in numbers:
        log.append(path, [{"step": step, "loss": step / 3, "text": "Say\u2028\ud7ff – \x1b[0m"}])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    append(tmp_path / "metrics.jsonl", 1, 2, 3, 4, 5)
    return tmp_path / "metrics.jsonl"


def steps(path: Path) -> list[int]:
    return [record["step"] for record in log.read(path)]


def test_what_is_written_is_read_and_text_stays_readable(path: Path):
    log.append(path, [{"step": 6, "text": "Ü 漢 \ud800\r\n\u2028"}, {"step": 6, "text": None}])
    assert [record.get("text") for record in log.read(path)][-2:] == ["Ü 漢 \ud800\r\n\u2028", None]
    assert "Ü 漢" in path.read_text()
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


ENDS = [b'{"step": 6, "lo', b"\n", b"\0" * 20, b"[]\n", b'{"a": 1}\n', b"\xff\xfe\n", b'{"step": "6"}\n']


@pytest.mark.parametrize("end", [*ENDS, b'{"step": ' + b"[" * 10**5 + b"\n"])
def test_what_is_no_line_is_left_out_and_said(path: Path, end: bytes):
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(end)
    assert steps(path) == [1, 2, 3, 4, 5]  # while the run still writes
    assert log.cut_after(path, 5) == [f"{path} line 6 is damaged and left out"]
    assert path.read_bytes() == whole
    assert log.cut_after(path, 3) == []
    assert path.read_bytes() == b"".join(whole.splitlines(keepends=True)[:3])
    append(path, 4)
    assert steps(path) == [1, 2, 3, 4]


def test_a_finished_log_is_compressed_and_read_as_before(path: Path):
    plain = path.read_bytes()
    log.finish(path)
    packed = path.with_name("metrics.jsonl.gz")
    assert os.listdir(path.parent) == [packed.name]
    assert gzip.decompress(packed.read_bytes()) == plain
    assert steps(path) == [1, 2, 3, 4, 5]
    log.finish(path)  # nothing has come since
    assert steps(path) == [1, 2, 3, 4, 5]
    content = packed.read_bytes()
    assert log.cut_after(path, 5) == []
    assert (os.listdir(path.parent), path.read_bytes()) == ([path.name], plain)
    log.finish(path)
    assert packed.read_bytes() == content
    path.write_bytes(plain)  # as where the compression was broken off
    assert steps(path) == [1, 2, 3, 4, 5]
    assert log.cut_after(path, 4) == []
    assert (os.listdir(path.parent), steps(path)) == ([path.name], [1, 2, 3, 4])


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda content: content + b"\0\1", lambda _: b"no"])
def test_a_compressed_log_that_is_damaged_keeps_its_lines_before(path: Path, damage):
    log.finish(path)
    packed = path.with_name("metrics.jsonl.gz")
    packed.write_bytes(damage(packed.read_bytes()))
    before = steps(path)
    assert before == list(range(1, len(before) + 1))
    assert log.cut_after(path, 5)[-1] == f"{path} line {len(before) + 1} is damaged and left out"
    assert (os.listdir(path.parent), steps(path)) == ([path.name], before)


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
@pytest.mark.parametrize("work", [log.finish, lambda path: log.cut_after(path, 4)], ids=["finish", "cut"])
def test_a_log_is_whole_wherever_a_process_ends(path: Path, work, power: bool):
    if work is not log.finish:
        log.finish(path)
    content = {file: file.read_bytes() for file in path.parent.iterdir()}
    for number in itertools.count(1):
        for file in path.parent.iterdir():
            file.unlink()
        for file, whole in content.items():
            file.write_bytes(whole)
        calls = FileCalls(path.parent, kill_before=number, power=power)
        status = in_child(lambda: work(path), Path(os.devnull), calls.install)
        assert steps(path) in ([1, 2, 3, 4, 5], [1, 2, 3, 4])
        assert log.cut_after(path, 4) == []
        assert steps(path) == [1, 2, 3, 4]
        if not status:
            break
        assert status == KILLED
    assert number > 5


def test_rollouts_are_read_update_by_update(tmp_path: Path):
    responses = [
        LoggedResponse("– \x1b[0m", [3, 7], 0.5, {"penalty/length": 0.5}, -0.25, finished=True),
        LoggedResponse("", [], 0.0, {"penalty/length": None}, None, finished=False),
    ]
    updates = [[LoggedGroup(step, text, -0.25, responses) for text in ("a", "\u2028\ud7ff:")] for step in (1, 2)]
    for update in updates:
        log.append(tmp_path / "rollouts.jsonl", map(asdict, update))
    assert [*log.read_updates(tmp_path / "rollouts.jsonl")] == updates
