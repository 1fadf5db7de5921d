"""Command lines that work, to which tests add what does not."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from fastp3o.__main__ import COMMANDS, main
from fastp3o.cli import parse, parse_chosen
from fastp3o.commands.memory import MemoryConfig
from fastp3o.evaluation.win_rates import WinRateConfig
from fastp3o.generate.config import GenerateConfig
from fastp3o.objectives.config.online import OBJECTIVES
from fastp3o.objectives.config.preferences import OFFLINE_OBJECTIVES
from fastp3o.training.reward_model import RewardModelConfig
from fastp3o.training.sft import SFTConfig

SCRIPTS = Path(__file__).parents[3] / "scripts"
LENGTHS = "--max_prompt_tokens 32 --max_response_tokens 8"
TRAINING = f"--model models/whole --output_dir o --report_to none {LENGTHS}"
SAMPLING = "--prompts prompts.jsonl --reward rewards_for_tests:vowels"
ONLINE = f"{TRAINING} {SAMPLING} --updates 1 --prompts_per_update 4 --prompts_per_minibatch 4 --responses_per_prompt 2"
TINY = "--hidden_size 32 --intermediate_size 32 --layers 1 --vocab_size 300"
WORKING = {
    "p3o": ONLINE,
    "ppo": ONLINE,
    "online_dpo": ONLINE,
    "online": f"{ONLINE} --objective rloo",
    "sft": f"{TRAINING} --train_data sft.jsonl",
    "reward": f"{TRAINING} --train_data preferences.jsonl",
    "preference": f"{TRAINING} --objective dpo --train_data preferences.jsonl",
    "win_rate": f"--models models/whole,./models/whole {SAMPLING} {LENGTHS} --output o/win_rate.json",
    "generate": f"--model models/whole {SAMPLING} {LENGTHS} --output_dir o",
    "memory": "--model models/whole",
    "make_arithmetic": "--output o/sums.jsonl",
    "make_tiny_llama": f"--text sft.jsonl --output_dir o {TINY}",
}
# For random inputs, of which FASTP3O_FUZZ=600 tries this many of each kind.
fuzz = settings(
    max_examples=int(os.getenv("FASTP3O_FUZZ", "25")),
    deadline=None,
    suppress_health_check=[*HealthCheck],
)
# A configuration, or several by objective.
CONFIGS: dict[str, Any] = {
    **{objective: OBJECTIVES[objective] for objective in ("p3o", "ppo", "online_dpo")},
    "online": OBJECTIVES,
    "sft": SFTConfig,
    "reward": RewardModelConfig,
    "preference": OFFLINE_OBJECTIVES,
    "win_rate": WinRateConfig,
    "generate": GenerateConfig,
    "memory": MemoryConfig,
    "make_arithmetic": runpy.run_path(str(SCRIPTS / "make_arithmetic.py"))["ArithmeticConfig"],
    "make_tiny_llama": runpy.run_path(str(SCRIPTS / "make_tiny_llama.py"))["TinyLlamaConfig"],
}


def configure(script: str, flags: list[str]) -> Any:
    """The script's configuration. Exits, or raises ValueError, as the script does."""
    config = CONFIGS[script]
    return parse_chosen(config, flags) if isinstance(config, dict) else parse(config, flags)


def run(script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if script in COMMANDS:
        monkeypatch.setattr(sys, "argv", ["fastp3o", script, *flags])
        main()
    else:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
        monkeypatch.syspath_prepend(SCRIPTS)  # as Python does for a script
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")
