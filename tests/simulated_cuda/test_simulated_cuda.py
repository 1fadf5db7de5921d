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
    plugins = ["-p", "tests.simulated_cuda.plugin", "-p", "tests.fastp3o.conftest", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *plugins, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-5_000:]


def test_sample():
    run(f"{CASES}/rules.py", f"{CASES}/optimizer.py", f"{CASES}/updates.py", "-k", "rules or fp16 or optimizer")


def test_sample_of_losses():
    run(f"{CASES}/losses.py", "-k", "launches or places or dpo")


@pytest.mark.simulated
def test_losses():
    run(f"{CASES}/losses.py")


@pytest.mark.simulated
def test_rollouts():
    run(f"{CASES}/rollouts.py")


@pytest.mark.simulated
@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_updates(precision):
    run(f"{CASES}/updates.py", "-k", precision)


@pytest.mark.simulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("files", ["tests/kernels", "tests/fastp3o/models", "tests/fastp3o/rollouts"])
def test_tests_marked_gpu(files):
    run(files, "-m", "gpu", "-k", SIZES)
