"""Files with random damage: refused in one line, or taken if they can still be read.

FASTP3O_FUZZ=300 tries this many of each kind.
"""

import gzip
import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastp3o.cli import parse
from fastp3o.data.loading import load_demonstrations, load_prompts
from fastp3o.models.loading import load_tokenizer
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.script import run_script
from tests.fastp3o.bad_inputs.cases import lines
from tests.fastp3o.bad_inputs.working import EXAMPLES, ONLINE, WORKING, BegunError, run, taken

PROMPTS = [{"prompt": f"Say {word}:", "n": n} for n, word in enumerate(["tree", "river", "ocean"])]
LINES = lines(*PROMPTS).encode()
TALKS = ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}] for word in ("you", "there"))
MESSAGES = lines(*({"messages": talk} for talk in TALKS)).encode()
FLAGS = shlex.split(ONLINE)
YAML = "".join(f"{name[2:]}: {value}\n" for name, value in zip(FLAGS[::2], FLAGS[1::2], strict=True)).encode()
OF_A_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")
# Bytes that mean something in a file; others do not.
PIECES = st.sampled_from(
    [b'"', b"\\", b"{", b"}", b"[", b"\n", b":", b",", b"\0", b"\xff", b"null", b"NaN", b"1e999", b"-9"]
)
EDITS = st.lists(
    st.tuples(st.sampled_from(["insert", "replace", "delete", "cut"]), st.integers(0), PIECES | st.binary(max_size=8)),
    min_size=1,
    max_size=3,
)


def damaged(content: bytes, edits: list[tuple[str, int, bytes]]) -> bytes:
    for kind, place, piece in edits:
        at = place % (len(content) + 1)
        rest = {"insert": content[at:], "replace": content[at + len(piece) :], "delete": content[at + 9 :], "cut": b""}
        content = content[:at] + (b"" if kind in ("delete", "cut") else piece) + rest[kind]
    return content


def parquet() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(PROMPTS), sink)
    return sink.getvalue().to_pybytes()


@pytest.fixture
def damage(capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def damage(path: Path, content: bytes, use: Callable[[], object]) -> None:
        """Uses a file as it is, which works, and then damaged."""

        def begun(content: bytes) -> bool:
            path.write_bytes(content)
            taken_as = taken(lambda: run_script(use), capfd)
            shutil.rmtree("o", ignore_errors=True)
            return taken_as is not None

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(EDITS)
        def attempt(edits: list[tuple[str, int, bytes]]) -> None:
            if begun(damaged(content, edits)) and content == LINES and path.suffix == ".jsonl":
                records = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
                assert all(record["prompt"].strip() for record in records)

        assert begun(content)
        attempt()

    return damage


def begin_with(loaded: object) -> NoReturn:
    raise BegunError


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.jsonl", LINES),
        ("prompts.jsonl.gz", gzip.compress(LINES)),
        ("prompts.json", json.dumps(PROMPTS).encode()),
        ("prompts.parquet", parquet()),
        ("messages.jsonl", MESSAGES),
        ("run.yaml", YAML),
    ],
)
def test_a_damaged_file_is_refused_in_one_line_or_still_read(name, content, tmp_path, models, damage):
    path, tokenizer = str(tmp_path / name), load_tokenizer(str(models / "chat"))
    uses = {
        "prompts": lambda: load_prompts(path, tokenizer, max_prompt_tokens=32),
        "messages": lambda: load_demonstrations(path, tokenizer, max_prompt_tokens=32, max_response_tokens=8),
        "run": lambda: parse(P3OConfig, [path]),
    }
    use = uses[name.partition(".")[0]]
    damage(Path(path), content, lambda: begin_with(use()))


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_damaged_model_is_refused_in_one_line_or_still_reads(name, stopping, monkeypatch, damage):
    shutil.copytree(stopping / "models" / "whole", stopping / "damaged")
    path, flags = stopping / "damaged" / name, shlex.split(f"{WORKING['p3o']} --model damaged")
    damage(path, path.read_bytes(), lambda: run("p3o", flags, monkeypatch))
