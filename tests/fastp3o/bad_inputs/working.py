"""Command lines that work, to which tests add what does not."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

# Of what is drawn at random, tried of each kind.
EXAMPLES = int(os.environ.get("FASTP3O_FUZZ", "25"))

SCRIPTS = Path(__file__).parents[3] / "scripts"
TRAINING = "--model models/whole --output_dir o --report_to none --max_prompt_tokens 32 --max_response_tokens 8"
ONLINE = f"{TRAINING} --prompts prompts.jsonl --reward rewards_for_tests:vowels --updates 1 --prompts_per_update 4"
WORKING = {
    "p3o": ONLINE,
    "ppo": ONLINE,
    "online_dpo": ONLINE,
    "online": f"{ONLINE} --objective rloo",
    "sft": f"{TRAINING} --train_data sft.jsonl",
    "reward_model": f"{TRAINING} --train_data preferences.jsonl",
    "preference": f"{TRAINING} --objective dpo --train_data preferences.jsonl",
    "win_rate": "--first models/whole --second models/whole --prompts prompts.jsonl --reward rewards_for_tests:vowels "
    "--max_prompt_tokens 32 --max_response_tokens 8 --output o/win_rate.json",
    "generate": "--model models/whole --prompts prompts.jsonl --reward rewards_for_tests:vowels --output_dir o "
    "--max_prompt_tokens 32 --max_response_tokens 8",
    "memory": "--model models/whole",
    "make_arithmetic": "--output o/sums.jsonl",
    "make_tiny_llama": "--text sft.jsonl --output_dir o --hidden_size 32 --intermediate_size 32 --layers 1 "
    "--vocab_size 300",
}


def run(script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")


class BegunError(BaseException):
    """In the place of training and sampling: every check is behind. config: where it is known."""

    def __init__(self, config: Any = None):
        self.config = config


def taken_by(
    script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> BegunError | None:
    """How the script begins, or None where it refuses in one line, which is checked."""
    capfd.readouterr()
    try:
        run(script, flags, monkeypatch)
    except BegunError as begun:
        return begun
    except SystemExit as stopped:
        usage, said = stopped.code == 2, capfd.readouterr().err
        line = said.splitlines()[-1] if usage else str(stopped.code)
        assert "error: " in line
        assert len(line.splitlines()) == 1
        assert "Traceback" not in said
        return None
    raise AssertionError("neither refused nor begun")
