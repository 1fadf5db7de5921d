"""`fastp3o COMMAND`: every command is there, and says what it does; `evaluate` rewards a model's
samples.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import fastp3o
from fastp3o.__main__ import COMMANDS, STAGES, main

FOLDER = Path(main.__code__.co_filename).parent / "commands"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fastp3o", *arguments])
    main()


def test_every_file_is_a_command(monkeypatch):
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert sorted([*files, *STAGES]) == sorted(COMMANDS)
    for arguments, status in (((), 2), (("--help",), 0), (("nosuch",), 2)):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *arguments)
        assert ended.value.code == status


def test_an_objective_is_a_command_too(monkeypatch, capsys):
    for name, own in (
        ("grpo", "--loss_mean"),
        ("online-dpo", "--kl_coef"),
        ("dpo", "--beta"),
        ("kto", "--beta"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, name, "--help", "all")
        assert not ended.value.code
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: fastp3o {name.replace('-', '_')} ")
        assert f"  {own} " in shown


def test_the_version_and_what_is_no_command(monkeypatch, capsys):
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, "--version")
    assert not ended.value.code
    assert capsys.readouterr().out == f"fastp3o {fastp3o.__version__}\n"
    with pytest.raises(SystemExit):
        run(monkeypatch, "tarin")
    assert capsys.readouterr().err.endswith("unknown command tarin\n")


def test_python_m_and_hyphens(workplace):
    told = subprocess.check_output(
        [sys.executable, "-m", "fastp3o", "win-rate", "--help"], text=True
    )
    assert told.startswith("usage: fastp3o win_rate")


def test_evaluate_gives_means_over_prompts(workplace, tiny_model, monkeypatch):
    def evaluate(*flags: str) -> dict:
        rewards = "rewards_for_tests:vowels,rewards_for_tests:varied"
        plain = f"--prompts prompts.jsonl --max_response_tokens 6 --max_prompt_tokens 64 --reward {rewards}"
        run(
            monkeypatch,
            "evaluate",
            "--model",
            tiny_model,
            *plain.split(),
            "--output",
            "means.json",
            *flags,
        )
        return json.loads(Path("means.json").read_text())

    sampled = evaluate("--responses_per_prompt", "3")
    rewards = {"rewards_for_tests:vowels", "rewards_for_tests:varied"}
    assert sampled.keys() == {*rewards, "response_length", "missing_eos"}
    assert 0 < sampled["response_length"]["mean"] <= 6
    assert sampled["missing_eos"]["mean"] > 0.9, "few of a random model's six tokens are an end"
    assert sampled["rewards_for_tests:varied"]["interval"] > 0
    assert all(sampled[name].keys() == {"mean", "interval", "within", "offset"} for name in rewards)
    assert sampled["rewards_for_tests:varied"]["within"] > 0
    assert evaluate("--greedy")["rewards_for_tests:varied"].keys() == {"mean", "interval"}
    assert evaluate("--greedy", "--seed", "0") == evaluate("--greedy", "--seed", "1")
    with pytest.raises(SystemExit):
        evaluate("--greedy", "--top_k", "3")
    Path("folder").mkdir()
    with pytest.raises(SystemExit, match="--output folder is a folder, and must be a file"):
        evaluate("--output", "folder")
