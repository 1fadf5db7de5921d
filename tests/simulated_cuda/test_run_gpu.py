"""`benchmarks/run_gpu.sh` on the pretended device, at trial sizes: what it has measured is on disk, and is kept."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.simulated_cuda.native import ROOT, can_compile

pytestmark = [
    pytest.mark.simulated,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler"),
]
SETTINGS = {
    "FASTP3O_DEVICE": "gpu",
    "FASTP3O_PATIENCE": "20",
    "FASTP3O_PYTHON": sys.executable,
    "FASTP3O_TRIAL": "1",
    "OMP_NUM_THREADS": "1",
    "PYTEST_ADDOPTS": "-p tests.simulated_cuda.plugin",
}


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = ["bash", "benchmarks/run_gpu.sh", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment | SETTINGS, capture_output=True, text=True)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text()[-10_000:] for path in sorted((folder / "parts").glob("*.log")))


# Parts, and the levels of what they measure.
PARTS = {
    "smoke,head": {"hidden", "precision"},
    "rollouts,logits,packing,iteration": {"rollouts", "logits", "training", "memory", "iteration"},
    "objectives,tests": {"objectives"},
}


@pytest.mark.parametrize("parts", PARTS)
def test_parts_pass_and_are_not_run_again(tmp_path, parts):
    done = run(tmp_path, "--only", parts)
    assert done.returncode == 0, done.stdout + done.stderr + logs(tmp_path)
    record = json.loads((tmp_path / "kernels.gpu.json").read_text())
    assert "H100" in record["environment"]["device"]
    assert {result["level"] for result in record["benchmarks"]} == PARTS[parts]
    again = run(tmp_path, "--seconds", "0")
    for part in parts.split(","):
        assert f"{part}: passed" in done.stdout
        assert f"{part}: has results" in again.stdout
    assert json.loads((tmp_path / "kernels.gpu.json").read_text())["benchmarks"] == record["benchmarks"]
