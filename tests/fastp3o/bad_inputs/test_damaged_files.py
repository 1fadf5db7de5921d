"""Files with random damage: refused in one line, or taken if they still read; never a traceback."""

import shlex
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastp3o.cli import parse
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.script import run_script
from tests.fastp3o.bad_inputs.working import ONLINE, WORKING, begins, fuzz, run

# Bytes that mean something in a file; others do not.
PIECES = [b'"', b"\\", b"{", b"}", b"[", b"\n", b":", b",", b"\0", b"\xff", b"null", b"NaN", b"1e999", b"-9"]
KINDS = st.sampled_from(["insert", "replace", "delete", "cut"])
PIECE = st.sampled_from(PIECES) | st.binary(max_size=8)
EDITS = st.lists(st.tuples(KINDS, st.integers(0), PIECE), min_size=1, max_size=3)


def damaged(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, piece in edits:
        at = place % (len(content) + 1)
        rest = {"insert": content[at:], "replace": content[at + len(piece) :], "delete": content[at + 9 :], "cut": b""}
        content = content[:at] + (b"" if kind in ("delete", "cut") else piece) + rest[kind]
    return content


FLAGS = shlex.split(ONLINE)
YAML = "".join(f"{name[2:]}: {value}\n" for name, value in zip(FLAGS[::2], FLAGS[1::2], strict=True)).encode()
OF_A_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.mark.parametrize("name", ["run.yaml", *OF_A_MODEL])
def test_a_damaged_file_is_refused_in_one_line_or_still_read(name: str, stopping: Path, monkeypatch, capfd):
    shutil.copytree(stopping / "models" / "whole", stopping / "damaged")
    path, flags = stopping / "damaged" / name, shlex.split(f"{WORKING['p3o']} --model damaged")
    content = path.read_bytes() if path.exists() else YAML

    def begun(content: bytes) -> bool:
        path.write_bytes(content)
        use = (lambda: parse(P3OConfig, [str(path)])) if name == "run.yaml" else lambda: run("p3o", flags, monkeypatch)
        shutil.rmtree("o", ignore_errors=True)
        return begins(lambda: run_script(use), capfd)

    @fuzz
    @given(EDITS)
    def attempt(edits: list[tuple[str, int, bytes]]) -> None:
        begun(damaged(content, edits))

    assert begun(content)
    attempt()
