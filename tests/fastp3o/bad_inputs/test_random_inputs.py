"""Odd values of flags and files with random damage: refused in one line, or taken as they read; never a traceback.

FASTP3O_FUZZ=600 tries this many of each kind.
"""

import os
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastp3o.cli import parse
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.script import run_script
from tests.fastp3o.bad_inputs.working import ONLINE, WORKING, configure, run, taken

fuzz = settings(
    max_examples=int(os.environ.get("FASTP3O_FUZZ", "25")), deadline=None, suppress_health_check=list(HealthCheck)
)
ODD = (
    *("", " ", "nan", "inf", "-inf", "1e400", "1e-400", "-1", "0", "-0.0", "1", "2", "1.5", "1e30", "9" * 30),
    *("0x10", "1_000", "٣", "true", "None", "null", "a\0b", "é漢", "\udcff", "[]", "{}", ",", "a,b", ":", "x" * 5000),
    *(".", "models", "models/whole", "prompts.jsonl", "rewards_for_tests:vowels", "rewards_for_tests"),
)
SAMPLING_OR_TRAINING = [name for name in WORKING if name != "memory" and not name.startswith("make_")]
TRUTHS = {"true": True, "1": True, "0": False}


@pytest.mark.parametrize("script", SAMPLING_OR_TRAINING)
def test_an_odd_value_is_refused_in_one_line_or_taken_as_it_reads(script: str, stopping: Path, monkeypatch, capfd):
    working = shlex.split(WORKING[script])
    names = [field.name for field in fields(configure(script, working))]

    files = set(stopping.iterdir())

    def begun(*flags: str):
        begun = taken(lambda: run(script, [*working, *flags], monkeypatch), capfd)
        # The next one must not find what this one has left.
        for path in set(stopping.iterdir()) - files:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return begun

    @fuzz
    @given(st.sampled_from(names), st.sampled_from(ODD))
    def attempt(name: str, value: str) -> None:
        if (seen := begun(f"--{name}={value}")) and seen.config is not None:
            read = getattr(seen.config, name)
            if (name, value) == ("prompts_per_minibatch", "0"):  # stands for all prompts of an update
                assert read == seen.config.prompts_per_update
            else:
                assert read == (TRUTHS[value] if isinstance(read, bool) else type(read)(value))

    assert begun(), "the command without the value works"
    attempt()


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
        begun = taken(lambda: run_script(use), capfd)
        shutil.rmtree("o", ignore_errors=True)
        return begun is not None

    @fuzz
    @given(EDITS)
    def attempt(edits: list[tuple[str, int, bytes]]) -> None:
        begun(damaged(content, edits))

    assert begun(content)
    attempt()
