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


ENDS = [
    b'{"step": 6, "lo',
    b"\n",
    b"\0" * 20,
    b"[]\n",
    b'{"a": 1}\n',
    b"\xff\xfe\n",
    b'{"step": "6"}\n',
]


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


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
def test_a_log_is_whole_wherever_a_process_ends(path: Path, power: bool):
    content = {file: file.read_bytes() for file in path.parent.iterdir()}
    for number in itertools.count(1):
        for file in path.parent.iterdir():
            file.unlink()
        for file, whole in content.items():
            file.write_bytes(whole)
        calls = FileCalls(path.parent, kill_before=number, power=power)
        status = in_child(lambda: log.cut_after(path, 4), Path(os.devnull), calls.install)
        assert steps(path) in ([1, 2, 3, 4, 5], [1, 2, 3, 4])
        assert log.cut_after(path, 4) == []
        assert steps(path) == [1, 2, 3, 4]
        if not status:
            break
        assert status == KILLED
    assert number > 5


def test_rollouts_are_read_update_by_update_and_lines_that_hold_no_group_are_left_out(
    tmp_path: Path,
):
    path = tmp_path / "rollouts.jsonl"
    responses = [
        LoggedResponse("– \x1b[0m", [3, 7], 0.5, {"penalty/length": 0.5}, -0.25, finished=True),
        LoggedResponse("", [], 0.0, {"penalty/length": None}, None, finished=False),
    ]
    updates = [
        [LoggedGroup(step, text, -0.25, responses) for text in ("a", "\u2028\ud7ff:")]
        for step in (1, 2)
    ]
    for update in updates:
        log.append(path, map(asdict, update))
    good = asdict(updates[1][0])
    unrewarded = good["responses"][0] | {"reward": None}
    log.append(
        path, [good | {"responses": responses} for responses in (None, [{}], [], [unrewarded])]
    )
    path.write_text(path.read_text() + '{"step": 2, "prompt"\n' + "[" * 10**5 + "\n")
    assert [*log.read_updates(path)] == updates
