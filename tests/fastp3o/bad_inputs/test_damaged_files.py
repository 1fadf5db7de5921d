"""Files with random damage: refused in one line, or taken where they still read as what they are.

FASTP3O_FUZZ=300 tries so many of each kind, and `pytest -s` says what came of them.
"""

import gzip
import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fastp3o.bad_inputs.working import EXAMPLES, ONLINE, WORKING, taken_by

PROMPTS = [{"prompt": f"Say {word}:", "n": n} for n, word in enumerate(["tree", "river", "ocean"])]
LINES = "".join(json.dumps(record) + "\n" for record in PROMPTS).encode()
MESSAGES = b"".join(
    json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]}).encode()
    + b"\n"
    for word in ("you", "there")
)
# What in a file means something, beside bytes that do not.
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


YAML = "".join(
    f"{name.removeprefix('--')}: {value}\n"
    for name, value in zip(shlex.split(ONLINE)[::2], shlex.split(ONLINE)[1::2], strict=True)
).encode()
# Script and flags, the file that they name, and what it holds.
FILES = {
    "JSON Lines": ("p3o", f"{ONLINE} --prompts damaged.jsonl", "damaged.jsonl", LINES),
    "compressed": ("p3o", f"{ONLINE} --prompts damaged.jsonl.gz", "damaged.jsonl.gz", gzip.compress(LINES)),
    "messages": (
        "sft",
        f"{WORKING['sft']} --model models/chat --train_data damaged.jsonl",
        "damaged.jsonl",
        MESSAGES,
    ),
    "JSON": ("p3o", f"{ONLINE} --prompts damaged.json", "damaged.json", json.dumps(PROMPTS).encode()),
    "parquet": ("p3o", f"{ONLINE} --prompts damaged.parquet", "damaged.parquet", parquet()),
    "YAML": ("p3o", "damaged.yaml", "damaged.yaml", YAML),
}
OF_A_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def damage(stopping: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def damage(kind: str, script: str, flags: str, path: Path, content: bytes) -> None:
        """Runs a command that works as the file is, and then with the file damaged."""
        outcomes: Counter[str] = Counter()

        def taken(content: bytes) -> bool:
            path.write_bytes(content)
            begun = taken_by(script, shlex.split(flags), monkeypatch, capfd)
            shutil.rmtree("o", ignore_errors=True)
            return begun is not None

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(EDITS)
        def attempt(edits: list[tuple[str, int, bytes]]) -> None:
            begun = taken(damaged(content, edits))
            outcomes["taken" if begun else "refused"] += 1
            if begun and kind == "JSON Lines":
                records = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
                assert all(record["prompt"].strip() for record in records)

        assert taken(content)
        attempt()
        with capfd.disabled():
            print(f"\n{kind}: {dict(outcomes)}")

    return damage


@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_refused_in_one_line_or_still_reads(kind: str, stopping: Path, damage: Callable[..., None]):
    script, flags, name, content = FILES[kind]
    damage(kind, script, flags, stopping / name, content)


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_damaged_model_is_refused_in_one_line_or_still_reads(name: str, stopping: Path, damage: Callable[..., None]):
    shutil.copytree(stopping / "models" / "whole", stopping / "damaged")
    path = stopping / "damaged" / name
    damage(name, "p3o", f"{WORKING['p3o']} --model damaged", path, path.read_bytes())
