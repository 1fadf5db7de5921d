"""Odd values of every flag: refused in one line, or taken as they read; never a traceback, never in silence.

FASTP3O_FUZZ=1000 tries this many for each script.
"""

import shlex
import shutil
from argparse import ArgumentTypeError
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.hf_argparser import string_to_bool

from tests.fastp3o.bad_inputs.working import EXAMPLES, WORKING, configure, run, taken

SCRIPTS = [script for script in WORKING if not script.startswith("make_") and script != "memory"]
ODD = (
    *("", " ", "nan", "inf", "-inf", "1e400", "1e-400", "-1", "0", "-0.0", "1", "2", "1.5", "1e30", "9" * 30),
    *("0x10", "1_000", "٣", "true", "None", "null", "a\0b", "é漢", "\udcff", "[]", "{}", ",", "a,b", ":", "x" * 5000),
    *(".", "models", "models/whole", "prompts.jsonl", "rewards_for_tests:vowels", "rewards_for_tests"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_odd_value_is_refused_in_one_line_or_taken_as_it_reads(script: str, stopping: Path, monkeypatch, capfd):
    working = shlex.split(WORKING[script])
    names = [field.name for field in fields(configure(script, working))]

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
    @given(st.sampled_from(names), st.sampled_from(ODD))
    def attempt(name: str, value: str) -> None:
        flags, before = [*working, f"--{name}={value}"], set(stopping.iterdir())
        begun = None if refused_as_a_flag(script, flags) else taken(lambda: run(script, flags, monkeypatch), capfd)
        # The next one must not find what this one has left.
        for path in set(stopping.iterdir()) - before:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if begun and begun.config is not None:
            # 0 stands for all prompts of an update.
            all_prompts = (name, value) == ("prompts_per_minibatch", "0")
            expected = str(begun.config.prompts_per_update) if all_prompts else value
            assert reads_as(getattr(begun.config, name), expected)

    assert taken(lambda: run(script, working, monkeypatch), capfd), "the command without the value works"
    shutil.rmtree("o", ignore_errors=True)
    attempt()


def refused_as_a_flag(script: str, flags: list[str]) -> bool:
    """Whether the configuration refuses the flags, and so the script (test_bad_inputs.py tests how it says so)."""
    try:
        configure(script, flags)
    except SystemExit as stopped:
        return stopped.code == 2
    except ValueError:
        return True
    return False


def reads_as(taken: Any, value: str) -> bool:
    if isinstance(taken, bool):
        try:
            return string_to_bool(value) is taken
        except ArgumentTypeError:
            return False
    return taken == type(taken)(value)
