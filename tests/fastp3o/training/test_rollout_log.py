import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.training.rollout_log import LoggedGroup, LoggedResponse, append_groups, read_updates
from fastp3o.training.run_folder import keep_until


def group(step: int, prompt: str = "Say tree:") -> LoggedGroup:
    responses = [
        LoggedResponse(f"{step} – \x1b[0m", [step, 7], step / 3, {"penalty/length": 0.5}, -0.25, finished=True),
        LoggedResponse("", [], 0.0, {"penalty/length": None}, None, finished=False),
    ]
    return LoggedGroup(step, prompt, -0.25, responses)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    for step in range(1, 6):
        append_groups(tmp_path / "rollouts.jsonl.gz", [group(step), group(step, "Say\u2028\ud7ff:")])
    return tmp_path / "rollouts.jsonl.gz"


def steps(path: Path) -> list[int]:
    return [groups[0].step for groups in read_updates(path)]


def test_what_is_written_is_read(path: Path):
    assert list(read_updates(path))[2] == [group(3), group(3, "Say\u2028\ud7ff:")]
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()  # as zcat does
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]


def test_updates_after_a_step_go_and_those_before_keep_their_bytes(path: Path):
    before = path.read_bytes()
    assert keep_until(path, 5) == []
    assert path.read_bytes() == before
    assert keep_until(path, 3) == []
    assert before.startswith(path.read_bytes())
    assert steps(path) == [1, 2, 3]
    append_groups(path, [group(4), group(4, "Say\u2028\ud7ff:")])
    append_groups(path, [group(5), group(5, "Say\u2028\ud7ff:")])
    assert path.read_bytes() == before
    assert keep_until(path, 0) == []
    assert path.read_bytes() == b""


@given(st.data())
def test_a_stop_within_an_update_costs_that_update_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log") / "rollouts.jsonl.gz"
    ends = []
    for step in range(4):
        append_groups(path, [group(step)])
        ends.append(path.stat().st_size)
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    expected = [step for step, end in enumerate(ends) if end <= cut]
    assert steps(path) == expected  # of a run that is still writing
    damaged = keep_until(path, 9)
    assert steps(path) == expected
    between = cut > 0 and cut not in ends
    assert damaged == [f"{path} part {len(expected) + 1} is damaged and left out"] * between


@pytest.mark.parametrize("end", [b"\0" * 20, b"\x1f\x8b\x08", b'{"step": 6}\n'])
def test_what_is_no_update_is_left_out_and_said(path: Path, end: bytes):
    before = path.read_bytes()
    path.write_bytes(before + end)
    assert steps(path) == [1, 2, 3, 4, 5]
    assert keep_until(path, 5) == [f"{path} part 6 is damaged and left out"]
    assert path.read_bytes() == before


def test_a_changed_byte_costs_its_update_alone(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    assert steps(path) == [1, 2, 4, 5]
    assert keep_until(path, 5) == [f"{path} part 3 is damaged and left out"]
    assert steps(path) == [1, 2, 4, 5]
