"""The kernels of compiled layers, lowered for CUDA again, are those of the record."""

import json
import subprocess
import sys

import pytest
import torch
import transformers

from benchmarks.roofline import COMPILED
from tests.fastp3o.torchrun import ROOT, environment
from tests.simulated_cuda.native import can_compile

COUNTED = """
from tests.simulated_cuda import compiled_counts
compiled_counts.take_cuda_for_given()
layer = compiled_counts.compiled_layer(compiled_counts.MODELS[0].config)
print(compiled_counts.json.dumps(layer))
"""


@pytest.mark.nightly
@pytest.mark.skipif(not can_compile(), reason="there is no C++ compiler")
def test_the_record_is_what_torch_lowers():
    record = json.loads(COMPILED.read_text())
    if (record["torch"], record["transformers"]) != (torch.__version__, transformers.__version__):
        pytest.skip(f"the record is of torch {record['torch']} and transformers {record['transformers']}")
    command = [sys.executable, "-c", COUNTED]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    layer = json.loads(done.stdout.splitlines()[-1])
    recorded = record["layers"]["1 B"]
    assert layer == {name: recorded[name] for name in ("forward", "backward")}
