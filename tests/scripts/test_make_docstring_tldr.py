"""The docstring set: what becomes a pair, modules that are apart, and rejected lines that are wrong."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docstring_tldr.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docstring_tldr", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def records(folder: Path, kind: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{kind}.{split}.jsonl").read_text("utf-8").splitlines()]


def module_of(prompt: str) -> str:
    return prompt.split("\n", 1)[0]


def test_modules_are_apart_and_rejected_lines_are_wrong_in_three_ways(script: ModuleType, tmp_path: Path):
    script.main(["--output_dir", str(tmp_path), "--stdlib_only", "--max_pairs", "150", "--workers", "1"])
    modules, kinds = {}, set()
    for split in ("train", "eval"):
        truth = {record["prompt"]: record["label"] for record in records(tmp_path, "sft", split)}
        assert truth.keys() == {record["prompt"] for record in records(tmp_path, "prompts", split)}
        modules[split] = set(map(module_of, truth))
        for record in records(tmp_path, "preferences", split):
            chosen, rejected = record["chosen"], record["rejected"]
            assert chosen == truth[record["prompt"]] != rejected
            assert rejected.startswith(" ")
            truncated, shuffled = chosen.startswith(rejected), sorted(chosen.split()) == sorted(rejected.split())
            siblings = [truth[prompt] for prompt in truth if module_of(prompt) == module_of(record["prompt"])]
            assert truncated or shuffled or rejected in siblings
            kinds.add("truncated" if truncated else "shuffled" if shuffled else "another's")
    assert modules["eval"]
    assert not modules["train"] & modules["eval"]
    assert kinds == {"truncated", "shuffled", "another's"}


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
