"""Runs tests on the pretended device: in a process of their own, since torch looks for devices when
it is imported.
"""

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
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", *plugins, *arguments]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-20_000:] + ran.stderr[-5_000:]


def test_sample():
    files = [
        f"{CASES}/{name}.py"
        for name in ("rules", "layers", "memory", "optimizer", "losses", "updates", "rollouts")
    ]
    some = "losses and (launches or dpo) or updates and (fp16 or advantages) or rollouts and (serves_until or excused)"
    run(*files, "-k", f"rules or llama and (layers or memory and fp16) or optimizer or {some}")


# Cases, and tests marked `gpu`: steps of the engine take the interpreter seconds, so one family
# stands for all.
EVERY = [
    *(
        (f"{CASES}/{case}.py", "")
        for case in ("layers", "losses", "memory", "rollouts", "supervised", "updates")
    ),
    *((f"{CASES}/runs.py", chosen) for chosen in ("online", "not online")),
    ("tests/kernels", f"gpu and {SIZES}"),
    ("tests/fastp3o/models", "gpu"),
    ("tests/fastp3o/rollouts", "llama and not compiled"),
    ("tests/fastp3o/test_smoke_on_gpu.py", "gpu"),
]


@pytest.mark.simulated
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("files", "chosen"), EVERY)
def test_everything(files, chosen):
    run(
        files,
        "-k",
        chosen,
        "--timeout",
        "3600",
        *([] if files.startswith(CASES) else ["-m", "gpu"]),
    )
