"""The docstring set: modules that are apart, and rejected lines that are wrong."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_docstring_tldr.py"


def records(folder: Path, kind: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / f"{kind}.{split}.jsonl").read_text("utf-8").splitlines()]


def module_of(prompt: str) -> str:
    return prompt.split("\n", 1)[0]


def test_modules_are_apart_and_rejected_lines_are_wrong_in_three_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    spec = importlib.util.spec_from_file_location("make_docstring_tldr", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, script)  # dataclasses look their module up
    spec.loader.exec_module(script)
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
