"""Every bad input ends in its one line, and trains nothing."""

import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from fastp3o.data import chat_template
from fastp3o.data.time_limit import TimeLimit
from tests.fastp3o.bad_inputs.broken_models import make_models
from tests.fastp3o.bad_inputs.cases import CASES, Case

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


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_model: str) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_models(folder, tiny_model)
    return folder


@pytest.fixture
def place(workplace: Path, models: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (workplace / "models").symlink_to(models)
    monkeypatch.setattr(chat_template, "LIMIT", TimeLimit(0.5))
    monkeypatch.delitem(sys.modules, "bad_rewards", raising=False)
    return workplace


def run(script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize("script", WORKING)
def test_without_the_mistake_it_works(script: str, place: Path, monkeypatch: pytest.MonkeyPatch):
    run(script, shlex.split(WORKING[script]), monkeypatch)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.script} {case.flags} {case.message}"[:80])
def test_a_bad_input_ends_in_one_line(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    for name, content in case.files.items():
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    flags, working = shlex.split(case.flags), shlex.split(WORKING[case.script])
    # A file of flags comes first, and flags behind it would override it.
    flags = [*flags, *not_in(case.files["run.yaml"], working)] if flags == ["run.yaml"] else [*working, *flags]
    with pytest.raises(SystemExit) as stopped:
        run(case.script, flags, monkeypatch)
    usage, said = stopped.value.code == 2, capfd.readouterr().err
    line = said.splitlines()[-1] if usage else str(stopped.value.code)
    assert case.message in line
    assert len(line.splitlines()) == 1
    assert usage or line.startswith("error: ")
    assert "Traceback" not in said
    assert not Path("o/model").exists(), "nothing is trained"
    assert "bad_rewards:" in case.flags or not Path("o").exists() or not os.listdir("o"), "no run is begun"


def not_in(content: str | bytes, flags: list[str]) -> list[str]:
    """The flags, of a name and a value each, that a file does not give."""
    given = content.decode(errors="ignore") if isinstance(content, bytes) else content
    pairs = zip(flags[::2], flags[1::2], strict=True)
    return [part for name, value in pairs if f"{name.removeprefix('--')}:" not in given for part in (name, value)]
