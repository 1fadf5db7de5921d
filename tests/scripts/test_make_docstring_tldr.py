"""The docstring set: what becomes a pair, and that the files are the same every time, apart by module, and loadable."""

import ast
import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastp3o.data.loading import load_demonstrations, load_preferences, load_prompts

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docstring_tldr.py"
KINDS = ("sft", "preferences", "prompts")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docstring_tldr", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run_arguments(folder: Path, *further: str) -> list[str]:
    return ["--output_dir", str(folder), "--stdlib_only", "--max_pairs", "150", *further]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docstrings")
    command = [sys.executable, SCRIPT, *run_arguments(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return folder


def records(folder: Path, kind: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{kind}.{split}.jsonl").read_text("utf-8").splitlines()]


def modules(folder: Path, split: str) -> set[str]:
    return {record["prompt"].split("\n", 1)[0] for record in records(folder, "sft", split)}


# --- the files ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_the_same_seed_writes_the_same_bytes(
    script: ModuleType,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(script, "collect", cache(script.collect))  # which knows of no seed
    script.main(run_arguments(tmp_path, "--workers", "1"))
    report = capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(path.name for path in folder.iterdir())
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in tmp_path.iterdir())
    assert "standard library" in report
    assert all(str(path) in report for path in tmp_path.iterdir())
    script.main(run_arguments(tmp_path, "--workers", "1", "--seed", "1"))
    assert modules(tmp_path, "eval") != modules(folder, "eval")


@pytest.mark.parametrize("split", ["train", "eval"])
def test_rejected_lines_are_wrong_in_three_ways(folder: Path, split: str):
    truth = {record["prompt"]: record["label"] for record in records(folder, "sft", split)}
    kinds = set()
    for record in records(folder, "preferences", split):
        chosen, rejected = record["chosen"], record["rejected"]
        assert chosen == truth[record["prompt"]] != rejected
        assert chosen.startswith(" ")
        assert rejected.startswith(" ")
        truncated, shuffled = chosen.startswith(rejected), sorted(chosen.split()) == sorted(rejected.split())
        same_module = [
            label for prompt, label in truth.items() if prompt.split("\n")[0] == record["prompt"].split("\n")[0]
        ]
        assert truncated or shuffled or rejected in same_module
        kinds.add("truncated" if truncated else "shuffled" if shuffled else "another's")
    assert split == "eval" or kinds == {"truncated", "shuffled", "another's"}


def test_the_files_load(folder: Path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    byte_level = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level, eos_token="</s>")
    for split in ("train", "eval"):
        lengths = {"max_prompt_tokens": 512, "max_response_tokens": 128}
        _, prompts = load_prompts(str(folder / f"prompts.{split}.jsonl"), tokenizer, max_prompt_tokens=512)
        _, demonstrations = load_demonstrations(str(folder / f"sft.{split}.jsonl"), tokenizer, **lengths)
        _, preferences = load_preferences(str(folder / f"preferences.{split}.jsonl"), tokenizer, **lengths)
        assert prompts.examples == demonstrations.examples == len(records(folder, "sft", split))
        assert preferences.examples == len(records(folder, "preferences", split))


# --- from a docstring to a pair -------------------------------------------------------------------------------------

BODY = """
    The socket must be connected to a remote socket, and this method continues to send data until
    either all data has been sent or an error occurs.

    >>> send(b"x")
    1

    Args:
        data (bytes): What is sent, which
            may be empty.
        flags: Passed on as they are.

    Example::

        send(b"x")
"""


def only_pair(script: ModuleType, docstring: str):
    return script.docstring_pair(
        "socket", "send", ast.get_docstring(ast.parse(f'"""{docstring}"""')), script.Bounds(20, 130, 3, 24)
    )


def test_prose_and_arguments_are_kept_and_code_is_not(script: ModuleType):
    pair = only_pair(script, f"Send `data` to the :class:`socket.socket`.\n{BODY}")
    assert pair.response == " Send data to the socket.socket."
    assert pair.prompt == (
        "MODULE: socket\n\nNAME: send\n\nPOST: The socket must be connected to a remote socket, and this method "
        "continues to send data until either all data has been sent or an error occurs.\n\n"
        "Args: data (bytes): What is sent, which may be empty.\n\nflags: Passed on as they are.\n\nTL;DR:"
    )


@pytest.mark.parametrize(
    "docstring",
    [
        "Send data.",
        f"Send.\n{BODY}",
        f"send(data) -> int\n{BODY}",
        f"Send data to the socket:\n{BODY}",
        f"The socket must be connected to a remote socket\n{BODY}",
        "Send data to the socket.\n\nArgs:\n    data: " + "words " * 30,
        "Send data to the socket.\n\n>>> " + "words " * 30,
    ],
    ids=["no body", "one word", "signature", "colon", "summary in the body", "only arguments", "only code"],
)
def test_docstrings_that_make_no_pair(script: ModuleType, docstring: str):
    assert only_pair(script, docstring) is None
