"""Runs tests on the pretended device: in a process of their own, since torch looks for devices when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.simulated_cuda.native import ROOT, can_compile

CASES = "tests/simulated_cuda/cases"
# The sizes of these are a GPU's: the interpreter would take hours. Recompilation is the compiler's.
SIZES = "not 65535 and not 2_to_the_31 and not recompile and not real_vocabulary"

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler"),
]


def done(command: list[str], *, ends: tuple[int, ...] = (0,), **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | settings
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode in ends, ran.stdout[-20_000:] + ran.stderr[-5_000:]
    return ran.stdout


def run(*arguments: str) -> None:
    plugins = ["-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider"]
    # pytest finds the fixtures of fastp3o's own tests itself, and refuses to have them twice.
    plugins += ["-p", "tests.fastp3o.conftest"] if arguments[0].startswith(CASES) else []
    done([sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *plugins, *arguments])


def test_sample():
    files = [f"{CASES}/{name}.py" for name in ("rules", "optimizer", "preparation", "losses", "updates")]
    run(*files, "-k", "rules or optimizer or preparation or losses and (launches or dpo) or updates and fp16")


# Cases, and tests marked `gpu`: steps of the engine take the interpreter seconds, so one family stands for all.
EVERY = [
    *((f"{CASES}/{case}.py", "") for case in ("losses", "rollouts", "supervised", "updates")),
    *((f"{CASES}/runs.py", chosen) for chosen in ("online", "offline", "not online and not offline")),
    ("tests/kernels", f"gpu and {SIZES}"),
    ("tests/fastp3o/models", "gpu"),
    ("tests/fastp3o/rollouts", "llama and not compiled"),
    ("tests/fastp3o/test_smoke_on_gpu.py", "gpu"),
]


@pytest.mark.simulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("files", "chosen"), EVERY)
def test_everything(files, chosen):
    run(files, "-k", chosen, "--timeout", "3600", *([] if files.startswith(CASES) else ["-m", "gpu"]))


# Parts of `benchmarks/run_gpu.sh` at trial sizes, and the levels of what they measure.
PARTS = {
    "smoke,head": {"hidden", "precision"},
    "rollouts,logits,packing,iteration": {"rollouts", "logits", "training", "memory", "iteration"},
    "objectives,tests": {"objectives"},
}


@pytest.mark.simulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("parts", PARTS)
def test_parts_of_the_benchmarks_pass_and_are_not_run_again(tmp_path: Path, parts: str):
    command = ["bash", "benchmarks/run_gpu.sh", str(tmp_path)]
    settings = {"FASTP3O_DEVICE": "gpu", "FASTP3O_PATIENCE": "20", "FASTP3O_TRIAL": "1"}
    settings |= {"FASTP3O_PYTHON": sys.executable, "PYTEST_ADDOPTS": "-p tests.simulated_cuda.plugin"}
    printed = done([*command, "--only", parts], **settings)
    record = json.loads((tmp_path / "kernels.gpu.json").read_text())
    assert "H100" in record["environment"]["device"]
    assert {result["level"] for result in record["benchmarks"]} == PARTS[parts]
    again = done([*command, "--seconds", "0"], ends=(0, 1), **settings)
    assert all(f"{part}: passed" in printed and f"{part}: has results" in again for part in parts.split(","))
