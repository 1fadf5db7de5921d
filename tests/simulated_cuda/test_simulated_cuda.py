"""Runs tests on the pretended device: in a process of their own, since torch looks for devices when it is imported."""

import os
import subprocess
import sys

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


def run(*arguments: str) -> None:
    plugins = ["-p", "tests.simulated_cuda.plugin", "-p", "no:cacheprovider"]
    # pytest finds the fixtures of fastp3o's own tests itself, and refuses to have them twice.
    plugins += ["-p", "tests.fastp3o.conftest"] if arguments[0].startswith(CASES) else []
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *plugins, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_sample():
    files = [f"{CASES}/{name}.py" for name in ("rules", "optimizer", "preparation", "losses", "updates")]
    run(*files, "-k", "rules or optimizer or preparation or losses and (launches or places or dpo) or updates and fp16")


@pytest.mark.simulated
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", ["losses", "memory", "rollouts", "supervised", "updates"])
def test_cases(case):
    run(f"{CASES}/{case}.py")


@pytest.mark.simulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("stages", ["p3o or resumed or generate or second_device", "online", "offline or sft"])
def test_runs(stages):
    run(f"{CASES}/runs.py", "-k", stages)


# Steps of the engine take the interpreter seconds, so one family stands for all.
MARKED_GPU = {
    "tests/kernels": SIZES,
    "tests/fastp3o/models": "gpu",
    "tests/fastp3o/rollouts": "llama and not compiled",
    "tests/fastp3o/test_smoke_on_gpu.py": "gpu",
}


@pytest.mark.simulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", MARKED_GPU)
def test_tests_marked_gpu(files):
    run(files, "-m", "gpu", "-k", MARKED_GPU[files], "--timeout", "3600")
