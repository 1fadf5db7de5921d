"""Odd values of every flag: refused in one line, or taken as they read; never a traceback, never in silence.

FASTP3O_FUZZ=1000 tries so many of each script, and `pytest -s` says what came of them.
"""

import shlex
import shutil
from argparse import ArgumentTypeError
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.hf_argparser import string_to_bool

from fastp3o.evaluation.win_rates.head_to_head import WinRateConfig
from fastp3o.objectives.p3o import P3OConfig
from fastp3o.objectives.policy_gradient import RLOOConfig
from fastp3o.objectives.ppo import PPOConfig
from fastp3o.objectives.preferences import OFFLINE_OBJECTIVES, OnlineDPOConfig
from fastp3o.stages.generate.config import GenerateConfig
from fastp3o.stages.reward_model import RewardModelConfig
from fastp3o.stages.sft import SFTConfig
from tests.fastp3o.bad_inputs.working import EXAMPLES, WORKING, taken_by

CONFIGS: dict[str, type] = {
    "p3o": P3OConfig,
    "ppo": PPOConfig,
    "online_dpo": OnlineDPOConfig,
    "sft": SFTConfig,
    "reward_model": RewardModelConfig,
    "preference": OFFLINE_OBJECTIVES["dpo"],
    "online": RLOOConfig,
    "generate": GenerateConfig,
    "win_rate": WinRateConfig,
}
ODD = (
    *("", " ", "nan", "inf", "-inf", "1e400", "1e-400", "-1", "0", "-0.0", "1", "2", "1.5", "1e30", "9" * 30),
    *("0x10", "1_000", "٣", "true", "None", "null", "a\0b", "é漢", "\udcff", "[]", "{}", ",", "a,b", ":", "x" * 5000),
    *(".", "models", "models/whole", "prompts.jsonl", "rewards_for_tests:vowels", "rewards_for_tests"),
)


@pytest.mark.parametrize("script", CONFIGS)
def test_an_odd_value_is_refused_in_one_line_or_taken_as_it_reads(
    script: str, stopping: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    outcomes: Counter[str] = Counter()
    names = [field.name for field in fields(CONFIGS[script]) if field.init]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.sampled_from(names), st.sampled_from(ODD))
    def attempt(name: str, value: str) -> None:
        before = set(stopping.iterdir())
        taken = taken_by(script, [*shlex.split(WORKING[script]), f"--{name}={value}"], monkeypatch, capfd)
        outcomes["taken" if taken else "refused"] += 1
        assert not taken or taken.config is None or reads_as(getattr(taken.config, name), value)
        # The next one must not find what this one has left.
        for path in set(stopping.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    attempt()
    assert EXAMPLES < 100 or outcomes["taken"] > EXAMPLES / 20, "the command without the value works"
    with capfd.disabled():
        print(f"\n{script}: {dict(outcomes)}")


def reads_as(taken: Any, value: str) -> bool:
    if isinstance(taken, bool):
        try:
            return string_to_bool(value) is taken
        except ArgumentTypeError:
            return False
    return taken == type(taken)(value)
