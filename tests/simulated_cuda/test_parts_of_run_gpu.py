"""Each part of benchmarks/run_gpu.sh at tiny sizes on the pretended device: it ends and leaves a
record.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_parts import parts
from tests.simulated_cuda.native import ROOT, can_compile

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
    pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler"),
]
# Of each part the levels that its record must have; none of those that only prove.
LEVELS = {
    "smoke": set(),
    "body": {"model", "layers", "engine"},
    "iteration": {"iteration"},
    "training": {"training run"},
    "compiled": set(),
    "head": {"hidden"},
    "mended": set(),
    "packing": {"training"},
    "rollouts": {"rollouts"},
    "logits": {"logits"},
    "objectives": {"objectives"},
    "tests": set(),
}
# The interpreter of kernels is slow, and so is a machine on which other tests run.
PATIENCE = "20"
TIMEOUT = 3600  # seconds, of a part and of any test in it


def run(part: str, folder: Path) -> dict:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment |= {"FASTP3O_DEVICE": "gpu", "FASTP3O_TRIAL": "1", "FASTP3O_PATIENCE": PATIENCE}
    environment |= {
        "FASTP3O_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "OUT": str(folder / "out"),
    }
    environment["PYTEST_ADDOPTS"] = f"-p tests.simulated_cuda.plugin -n 0 --timeout {TIMEOUT}"
    (folder / "out").mkdir()
    command = ["bash", "benchmarks/run_gpu.sh", str(folder / "results"), "--only", part]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    logs = "".join(log.read_text()[-5000:] for log in (folder / "results" / "parts").glob("*.log"))
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-5000:] + logs
    assert f"{part}: passed" in ran.stdout
    assert (folder / "out" / "parts.tar.gz").exists()
    return json.loads((folder / "out" / "kernels.gpu.json").read_text())


def check(part: str, folder: Path) -> None:
    record = run(part, folder)
    assert record["environment"]["device"]
    assert {result["level"] for result in record["benchmarks"]} == LEVELS[part]
    assert not record["tests"]["failed"]
    reasons = {one["reason"] for one in record["not_measured"]}
    assert not any(reason.startswith(("failed: no result", "out of time")) for reason in reasons), (
        reasons
    )
    if not LEVELS[part]:
        assert record["tests"]["passed"] or (
            reasons and all(reason.startswith("absent") for reason in reasons)
        )


def test_every_part_is_tried():
    assert [part.name for part in parts("gpu") if part.name != "sanitizer"] == [*LEVELS]


def test_a_part_leaves_a_record(tmp_path):
    check("mended", tmp_path)


@pytest.mark.simulated
@pytest.mark.timeout(TIMEOUT)
@pytest.mark.parametrize("part", LEVELS)
def test_every_part_leaves_a_record(part, tmp_path):
    check(part, tmp_path)
