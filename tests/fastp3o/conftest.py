"""A byte-level tokenizer, a tiny random Llama and small files: enough for whole runs in seconds."""

import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from fastp3o.errors import UserError
from fastp3o.run import report as reporting
from fastp3o.run.report import Reporter
from tests.fastp3o.local_server import Server

METRICS = Path(__file__).parents[2] / "fastp3o" / "training" / "metrics.md"
REWARDS = '''
"""Rewards for tests, on a binary grid; `varied_and_shifted` adds a number per prompt."""
import os
import signal

CALLS = 0

def vowels(prompts, responses):
    return [sum(c in "aeiou" for c in response) / 4 for response in responses]

def varied(prompts, responses):
    return [sum(map(ord, response)) % 64 / 16 for response in responses]

def varied_and_shifted(prompts, responses):
    return [r + len(prompt) * 8 for r, prompt in zip(varied(prompts, responses), prompts)]

def constant(prompts, responses):
    return [2.0 for _ in responses]

def answered(prompts, responses, answer, *, word):
    assert all(w in prompt and a == len(w) for prompt, a, w in zip(prompts, answer, word))
    return [r + a for r, a in zip(varied(prompts, responses), answer)]

def call_of_the_run(responses):
    global CALLS
    CALLS += len(responses) > 1  # not the trial before the run
    return CALLS

def nan_on_third_call(prompts, responses):
    third = call_of_the_run(responses) == 3
    return [float("nan") if third else r for r in vowels(prompts, responses)]

def raises_on_third_call(prompts, responses):
    if call_of_the_run(responses) == 3 and os.environ.get("RANK", "1") == "1":
        raise KeyError("lost")
    return vowels(prompts, responses)

def stops_on_third_call(prompts, responses):
    if call_of_the_run(responses) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return vowels(prompts, responses)

def huge(prompts, responses):
    return [3e38 if index % 2 else -3e38 for index in range(len(responses))]
'''


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<end>", "<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": 2048}
    special = {
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    LlamaForCausalLM(LlamaConfig(**sizes, **special, tie_word_embeddings=True)).save_pretrained(
        folder
    )
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def errors_name_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a command; tests of Python's own errors turn it off."""
    monkeypatch.setattr(UserError, "names_flags", True)


@pytest.fixture(autouse=True)
def fresh_accelerator() -> None:
    """accelerate keeps one state a process, and the tests' runs differ in precision."""
    AcceleratorState._reset_state(reset_partial_state=True)


@cache
def documented_metrics() -> list[re.Pattern[str]]:
    """A pattern for each name in the first column of the page's table; NAME in it stands for any
    name.
    """
    _, table, _ = re.split(r"<!-- /?metrics -->", METRICS.read_text())
    first_cells = [line.split("|")[1] for line in table.strip().splitlines()[2:]]
    names = [name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)]
    assert len(set(names)) == len(names), "a metric stands in one line"
    return [re.compile(re.escape(name).replace("NAME", ".+")) for name in names]


@pytest.fixture(autouse=True)
def every_metric_stands_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a run of a test writes is explained in training/metrics.md."""
    write = Reporter.write

    def checked(self: Reporter, name: str, step: int, metrics: dict[str, float]) -> None:
        for metric in metrics:
            assert any(pattern.fullmatch(metric) for pattern in documented_metrics()), (
                f"{METRICS} has no {metric}"
            )
        write(self, name, step, metrics)

    monkeypatch.setattr(Reporter, "write", checked)


@pytest.fixture(autouse=True)
def runs_draw_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plot takes a second, longer than most runs of tests; tests of plots draw."""
    monkeypatch.setattr(reporting, "draw_progress", lambda metrics, evaluations, path: True)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Serves what the test's module says in SERVED."""
    with Server(*request.module.SERVED) as server:
        yield server


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data files and a module of reward functions, as current directory."""
    words = ["tree", "house", "river", "cloud", "stone", "apple", "eagle", "ocean"]
    files = {
        "prompts": [{"prompt": f"Say {word}:"} for word in words],
        "answers": [
            {"prompt": f"Say {word}:", "answer": len(word), "word": word} for word in words
        ],
        "sft": [{"prompt": f"Say {word}:", "label": f" {word}"} for word in words],
        "preferences": [
            {"prompt": f"Say {word}:", "chosen": f" {word}", "rejected": " zzz"} for word in words
        ],
        "unpaired": [
            {"prompt": f"Say {word}:", "completion": f" {said}", "label": said == word}
            for word in words
            for said in (word[::-1], word)
        ],
    }
    for name, records in files.items():
        (tmp_path / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    (tmp_path / "rewards_for_tests.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    for module in ("rewards_for_tests", "games"):  # which tests write
        sys.modules.pop(module, None)
    return tmp_path
