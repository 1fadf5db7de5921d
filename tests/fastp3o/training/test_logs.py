import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.training.run_folder import append_line, keep_until


@pytest.fixture
def path(tmp_path):
    for step in range(1, 6):
        append_line(tmp_path / "metrics.jsonl", step, {"loss": step / 3})
    return tmp_path / "metrics.jsonl"


def steps(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_what_is_not_finite_is_null(path):
    append_line(path, 6, {"loss": float("nan"), "ratio_max": float("inf"), "prompts": 3})
    assert json.loads(path.read_text().splitlines()[-1]) == {"step": 6, "loss": None, "ratio_max": None, "prompts": 3}


def test_lines_after_a_step_go_and_those_before_keep_their_bytes(path):
    first = path.read_bytes().splitlines(keepends=True)[:3]
    assert keep_until(path, 3) == []
    assert path.read_bytes() == b"".join(first)
    assert os.listdir(path.parent) == [path.name]


def test_a_file_without_such_lines_is_left_alone(path):
    before = path.stat()
    assert keep_until(path, 5) == []
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert keep_until(path.with_name("nothing"), 3) == []


@pytest.mark.parametrize("end", [b'{"step": 6, "lo', b"\n", b"\0" * 20, b"[]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"6\n"])
def test_what_is_no_line_is_left_out_and_said(path, end):
    with path.open("ab") as file:
        file.write(end)
    (line,) = keep_until(path, 5)
    assert line == f"{path} line 6 is damaged and left out"
    assert steps(path) == [1, 2, 3, 4, 5]
    append_line(path, 6, {})
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_last_line_that_lost_its_end_is_left_out(path):
    path.write_bytes(path.read_bytes()[:-1])
    keep_until(path, 5)
    assert steps(path) == [1, 2, 3, 4]


@given(st.data())
def test_a_stop_within_a_line_costs_that_line_alone(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("log") / "eval.jsonl"
    for step in range(4):
        append_line(path, step, {"kl": step * 1.5})
    whole = path.read_bytes()
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    keep_until(path, 9)
    assert steps(path) == list(range(whole[:cut].count(b"\n")))
