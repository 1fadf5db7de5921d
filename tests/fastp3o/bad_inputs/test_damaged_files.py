"""Files with random damage: refused in one line, or taken if they can still be read.

FASTP3O_FUZZ=300 tries this many of each kind, and `pytest -s` prints the outcomes.
"""

import gzip
import json
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from fastp3o.cli import parse
from fastp3o.data.loading import load_demonstrations, load_prompts
from fastp3o.models.loading import load_tokenizer
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.script import run_script
from tests.fastp3o.bad_inputs.working import EXAMPLES, ONLINE, WORKING, BegunError, run, taken

PROMPTS = [{"prompt": f"Say {word}:", "n": n} for n, word in enumerate(["tree", "river", "ocean"])]
LINES = "".join(json.dumps(record) + "\n" for record in PROMPTS).encode()
MESSAGES = b"".join(
    json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": word}]}).encode()
    + b"\n"
    for word in ("you", "there")
)
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


YAML = "".join(
    f"{name.removeprefix('--')}: {value}\n"
    for name, value in zip(shlex.split(ONLINE)[::2], shlex.split(ONLINE)[1::2], strict=True)
).encode()
PROMPT_FILES = {
    "damaged.jsonl": LINES,
    "damaged.jsonl.gz": gzip.compress(LINES),
    "damaged.json": json.dumps(PROMPTS).encode(),
    "damaged.parquet": parquet(),
}
OF_A_MODEL = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")


@pytest.fixture
def damage(capfd: pytest.CaptureFixture[str]) -> Callable[..., None]:
    def damage(path: Path, content: bytes, use: Callable[[], object]) -> None:
        """Uses a file as it is, which works, and then damaged."""
        outcomes: Counter[str] = Counter()

        def begun(content: bytes) -> bool:
            path.write_bytes(content)
            taken_as = taken(lambda: run_script(use), capfd)
            shutil.rmtree("o", ignore_errors=True)
            return taken_as is not None

        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        @given(EDITS)
        def attempt(edits: list[tuple[str, int, bytes]]) -> None:
            outcome = begun(damaged(content, edits))
            outcomes["taken" if outcome else "refused"] += 1
            if outcome and path.suffix == ".jsonl" and content == LINES:
                records = [json.loads(line) for line in path.read_bytes().splitlines() if line.strip()]
                assert all(record["prompt"].strip() for record in records)

        assert begun(content)
        attempt()
        with capfd.disabled():
            print(f"\n{path.name}: {dict(outcomes)}")

    return damage


def begin_with(loaded: object) -> NoReturn:
    raise BegunError


@pytest.fixture
def chat_tokenizer(models: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(models / "chat"))


@pytest.mark.parametrize("name", PROMPT_FILES)
def test_damaged_prompts_are_refused_in_one_line_or_still_read(
    name: str, tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase, damage: Callable[..., None]
):
    path = tmp_path / name
    damage(path, PROMPT_FILES[name], lambda: begin_with(load_prompts(str(path), chat_tokenizer, max_prompt_tokens=32)))


def test_damaged_messages_are_refused_in_one_line_or_still_read(
    tmp_path: Path, chat_tokenizer: PreTrainedTokenizerBase, damage: Callable[..., None]
):
    path, lengths = tmp_path / "damaged.jsonl", {"max_prompt_tokens": 32, "max_response_tokens": 8}
    damage(path, MESSAGES, lambda: begin_with(load_demonstrations(str(path), chat_tokenizer, **lengths)))


def test_damaged_yaml_is_refused_in_one_line_or_still_reads(tmp_path: Path, damage: Callable[..., None]):
    path = tmp_path / "damaged.yaml"
    damage(path, YAML, lambda: begin_with(parse(P3OConfig, [str(path)])))


@pytest.mark.parametrize("name", OF_A_MODEL)
def test_a_damaged_model_is_refused_in_one_line_or_still_reads(
    name: str, stopping: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[..., None]
):
    shutil.copytree(stopping / "models" / "whole", stopping / "damaged")
    path, flags = stopping / "damaged" / name, shlex.split(f"{WORKING['p3o']} --model damaged")
    damage(path, path.read_bytes(), lambda: run("p3o", flags, monkeypatch))
