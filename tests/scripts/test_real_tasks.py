"""The scripts of a real model, with an interpreter in the place of Python's that only notes what it
is asked for: every size names options that there are, and a second run repeats no stage.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastp3o.__main__ import STAGES, imported
from fastp3o.cli import parse
from fastp3o.evaluation.config import WinRateConfig
from tests.scripts.test_made_data import SCRIPTS

NOTES_WHAT_IS_ASKED = f"""#!{sys.executable}
import json, os, pathlib, sys
asked = sys.argv[1:]
if asked[0] == "-c":
    sys.exit(os.environ["SIZE"] != "gpu")
if asked[0] == "-":
    sys.exit()
with open(os.environ["ASKED"], "a") as file:
    print(json.dumps(asked), file=file)
flags = dict(zip(asked[:-1], asked[1:]))
if "fastp3o" in asked[:2]:
    print("after step 1: reward 0")
    if "--output_dir" in flags:
        pathlib.Path(flags["--output_dir"], "model").mkdir(parents=True)
elif "--output_dir" in flags:
    pathlib.Path(flags["--output_dir"]).mkdir(parents=True)
else:
    pathlib.Path(flags["--output"]).touch()
"""
TRAINED = {
    "human_preferences": ["sft", "reward", "reward", "p3o"],
    "film_reviews": ["sft", "reward", "p3o"],
}


def asked(script: str, size: str, folder: Path) -> list[list[str]]:
    """The calls of the interpreter that are added by a run of a script."""
    stub, noted = folder / "python", folder / "asked.jsonl"
    stub.write_text(NOTES_WHAT_IS_ASKED)
    stub.chmod(0o755)
    noted.unlink(missing_ok=True)
    variables = {"FASTP3O_LONG": "1" if size == "long" else "", "SIZE": size, "ASKED": str(noted)}
    variables |= {"FASTP3O_PYTHON": str(stub), "FASTP3O_RUN": str(folder / "run")}
    variables |= {"FASTP3O_REAL_MODEL": "owner/model", "FASTP3O_SEED": "7"}
    command = ["bash", str(SCRIPTS / f"{script}.sh")]
    subprocess.run(command, env=os.environ | variables, check=True, capture_output=True)
    return [json.loads(line) for line in noted.read_text().splitlines()]


@pytest.mark.parametrize("size", ["gpu", "long", "short"])
@pytest.mark.parametrize("script", TRAINED)
def test_stages_take_options_that_there_are_and_what_judges_does_not_train(script, size, tmp_path):
    calls = [call[2:] for call in asked(script, size, tmp_path) if call[:2] == ["-m", "fastp3o"]]
    *stages, (judging, *its_flags) = calls
    configs = [parse(imported(STAGES[command][0]), flags) for command, *flags in stages]
    assert [command for command, *_ in stages] == TRAINED[script]
    assert judging == "win_rate"
    judge, policy = parse(WinRateConfig, its_flags), configs[-1]
    assert judge.reward == policy.gold_reward != policy.reward
    assert judge.models == f"{policy.model},{policy.output_dir}/model"
    assert judge.prompts == policy.eval_prompts != policy.prompts
    assert {config.seed for config in (*configs, judge)} == {7}
    assert [config.model for config in configs] == [
        *("owner/model", *[f"{tmp_path}/run/sft/model"] * (len(configs) - 1))
    ]


@pytest.mark.parametrize("script", TRAINED)
def test_a_second_run_makes_no_data_and_trains_nothing(script, tmp_path):
    first, second = (asked(script, "short", tmp_path) for _ in range(2))
    assert len(first) > len(second) == 1
    assert second[0][:3] == ["-m", "fastp3o", "win_rate"]
