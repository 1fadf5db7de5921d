"""Programs in several processes on the CPU, as torchrun starts one on each GPU."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def torchrun(program: Path, *arguments: str, processes: int = 2) -> subprocess.CompletedProcess:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    paths = [str(ROOT), str(ROOT / "kernels"), ".", os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*launcher, str(program), *arguments],
        # `accelerate launch --cpu --num_processes 2` starts one process, and says nothing.
        env=os.environ
        | {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
    )
